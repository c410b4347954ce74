"""Processes on several machines: they list once, and what differs ends the run of all."""

import json
import shutil
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from harness import SMALL, checkpoint
from modules import images_in
from runs import TWO, torchrun
from together import together

from cait.errors import UserError
from cait.extras.machines import callbacks, machines
from cait.extras.machines.machines import check_shared, compare, own_files, share
from cait.guards.run_lock import RunLock
from cait.run.program import Processes

HOST = socket.gethostname()
SAME = "all processes of a run need the same data, code and settings"
FIRST = f"process 0 on {HOST}"


def test_a_value_is_made_once_on_each_machine(monkeypatch):
    """A machine is known by the folder that it lists, too."""

    def main(processes, rank):
        return share(processes, "one" if rank == 0 else "other", lambda: rank)

    assert together(main, monkeypatch) == [0, 1, 1]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_process_is_that_of_all(failing, monkeypatch):
    def fail():
        raise UserError("no image")

    def main(processes, rank):
        return share(processes, str(rank), fail if rank == failing else str)

    expected = [f"process {failing} on {HOST}: no image"] * 3
    expected[failing] = "no image"
    assert together(main, monkeypatch) == expected


@pytest.mark.parametrize(
    ("name", "values", "differs"),
    [
        ("--model.lr", "0.1 0.1 0.1", False),
        ("--model.lr", "0.2 0.1 0.1", True),
        ("checkpoint", "last.ckpt None last.ckpt", True),
        # only where both have it
        ("your file my_loss.py", "a a None", False),
        ("your file my_loss.py", "None a None", False),
        ("your file my_loss.py", "a b None", True),
    ],
)
def test_what_differs_is_named_in_all_processes(name, values, differs, monkeypatch):
    def main(processes, rank):
        value = values.split()[rank]
        compare({} if value == "None" else {name: value}, processes.agree)

    first, second, _ = values.split()
    line = f"process 1 on {HOST} has {name} {second}, {FIRST} {first}: {SAME}"
    assert together(main, monkeypatch) == [line if differs else None] * 3


def test_a_file_of_ones_own_is_known_by_its_content(tmp_path, monkeypatch):
    path = tmp_path / "my_loss.py"
    module: Any = SimpleNamespace(__file__=str(path))
    monkeypatch.setitem(sys.modules, "my_loss", module)
    digests = set()
    for text in ("x = 1", "x = 2"):
        path.write_text(text)
        digests.add(own_files()["your file my_loss.py"])
    assert len(digests) == 2


def test_a_machine_that_does_not_see_the_folder_of_the_run_is_named(tmp_path, monkeypatch):
    def main(processes, rank):
        check_shared(folders[rank], processes)

    monkeypatch.setattr(machines, "PATIENCE", 0.0)
    lock = RunLock(tmp_path / "run")
    folders = [tmp_path / "run"] * 3
    assert together(main, monkeypatch) == [None] * 3
    folders[1] = tmp_path / "own/run"
    answers = together(main, monkeypatch)
    for folder, answer in zip(folders, answers, strict=True):
        assert answer.startswith(f"{HOST} does not see {folder} as {HOST} has it: all machines")
    lock.roll_back()


def test_processes_that_lightning_starts_are_compared_once_they_are_connected(monkeypatch):
    def gather(words, word):
        words[:] = [json.dumps([HOST, facts]), word]

    facts = {"classes": "cat, dog"}
    monkeypatch.setattr(machines.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(machines.dist, "all_gather_object", gather)
    monkeypatch.setattr(machines, "facts", lambda facts: facts)
    run: Any = SimpleNamespace(program=SimpleNamespace(processes=Processes()))
    [comparison] = callbacks(run)
    comparison.run = facts
    comparison.setup(SimpleNamespace(world_size=2))
    comparison.run = {"classes": "dog, cat"}
    comparison.setup(SimpleNamespace(world_size=1))
    with pytest.raises(UserError, match=r"has classes dog, cat, .* cat, dog: "):
        comparison.setup(SimpleNamespace(world_size=2))


OF_A_SET = """
import os

import numpy as np
from PIL import Image

class Classes:
    \"\"\"Their order is another in each process, as that of a set is.\"\"\"

    classes = ["ash", "elm"] if os.environ.get("LOCAL_RANK", "0") == "0" else ["elm", "ash"]

    def __init__(self, split):
        pass

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return Image.fromarray(np.zeros((8, 8, 3), np.uint8)), index % 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), torchrun("--standalone")])
def test_classes_in_another_order_end_the_run_of_all_before_its_first_step(
    launcher, cait, tmp_path
):
    """Whether Lightning has started the second process or a launcher."""
    (tmp_path / "of_a_set.py").write_text(OF_A_SET)
    images = ["--data.root=of_a_set:Classes", "--data.batch_size=4", "--run_name=cut"]
    failed = cait("fit", *SMALL, *TWO, *images, command=launcher)
    assert failed.returncode != 0
    assert f"process 1 on {HOST} has classes elm, ash, {FIRST} ash, elm: {SAME}" in failed.stderr
    assert "cait/cli" not in failed.stderr  # no traceback of ours; torchrun shows its own
    assert not (tmp_path / "logs/cut").exists()  # its name stays free


def test_a_machine_that_lacks_an_image_differs(tmp_path, digits_root):
    shutil.copytree(digits_root, tmp_path / "copy")
    min((tmp_path / "copy/train/3").iterdir()).unlink()
    differing = []
    for root in (digits_root, tmp_path / "copy"):
        data = images_in(root, img_size=8)
        data.setup("fit")
        differing.append(data.facts()["training images"])
    assert differing[0].startswith("1,437 (")
    assert differing[1].startswith("1,436 (")


WATCHED = """
import os, sys, threading
from lightning.pytorch import Callback

class Nothing(Callback):
    pass

def look(event, arguments):
    in_thread = threading.current_thread() is not threading.main_thread()
    if event == "os.scandir" and in_thread and str(arguments[0]).endswith("digits/train/3"):
        open(f"listed by {os.environ.get('RANK')}", "a").close()

sys.addaudithook(look)
"""
"""Notes which process lists the images of a class, in a thread; Python reads it before there is a source of images."""


@pytest.mark.slow
def test_torchruns_processes_train_one_run_by_a_recipe_for_one_device(cait, tmp_path):
    (tmp_path / "watched.py").write_text(WATCHED)
    recipe = [
        *SMALL,
        "--trainer.max_epochs=1",
        "--run_name=one",
        "--trainer.callbacks+=watched.Nothing",
    ]
    done = cait("fit", *recipe, command=torchrun("--standalone"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("listed by *")} == {"listed by 0"}
    assert done.stdout.count("epoch 1/1") == 1
    assert "64 = 2 processes × 32 images" in done.stdout
    # without torchrun: Lightning starts both
    resumed = cait("resume", "one", "--trainer.max_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoint(tmp_path / "logs/one")["global_step"] == 44

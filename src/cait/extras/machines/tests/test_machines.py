"""Processes on several machines: they list once, and what differs ends the run of all."""

import socket

import pytest
from harness import SMALL, checkpoint, works
from runs import TWO, torchrun
from together import together

from cait.errors import UserError
from cait.extras.machines import machines
from cait.extras.machines.machines import check_shared, share
from cait.guards.run_lock import RunLock

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


def test_a_machine_that_does_not_see_the_folder_of_the_run_is_named(tmp_path, monkeypatch):
    def main(processes, rank):
        check_shared(folders[rank], processes)

    monkeypatch.setattr(machines, "PATIENCE", 0.0)
    lock = RunLock(tmp_path / "run")
    folders = [tmp_path / "run"] * 3
    assert together(main, monkeypatch) == [None] * 3
    folders[1] = tmp_path / "own/run"
    for folder, answer in zip(folders, together(main, monkeypatch), strict=True):
        assert answer.startswith(f"{HOST} does not see {folder} as {HOST} has it: all machines")
    lock.roll_back()


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
    words = "--trainer.max_epochs=1 --run_name=one --trainer.callbacks+=watched.Nothing"
    done = cait("fit", *SMALL, *words.split(), command=torchrun("--standalone"))
    assert {path.name for path in tmp_path.glob("listed by *")} == {"listed by 0"}
    assert done.stdout.count("epoch 1/1") == 1, done.stderr
    assert "64 = 2 processes × 32 images" in done.stdout
    # without torchrun: Lightning starts both
    works(cait("resume", "one", "--trainer.max_epochs=2"))
    assert checkpoint(tmp_path / "logs/one")["global_step"] == 44

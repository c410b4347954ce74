"""Processes on several machines: they list once, and what differs ends the run of all."""

import json
import re
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness import LIMIT, SMALL, Cait, checkpoint, link_digits, start
from runs import ENDLESS, TWO, torchrun
from together import together

from cait.errors import UserError
from cait.extras.machines import callbacks, machines
from cait.extras.machines.machines import check_shared, compare, own_files, share
from cait.guards.run_lock import RunLock
from cait.run.program import Processes

HOST = socket.gethostname()
SAME = "all processes of a run need the same data, code and settings"
ODD = f"process 1 on {HOST} has --model.lr 0.1, process 0 on {HOST} 0.2: {SAME}"
LACKS = f"process 1 on {HOST} has checkpoint None, process 0 on {HOST} last.ckpt: {SAME}"


def failing() -> None:
    raise UserError("no image")


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (lambda processes, rank: share(processes, "here", lambda: rank), [0] * 3),
        (
            lambda processes, rank: share(processes, "apart"[rank > 0 :], lambda: {rank}),
            [{0}, {1}, {1}],
        ),
        (
            lambda processes, rank: share(processes, "here", failing),
            ["no image", *[f"process 0 on {HOST}: no image"] * 2],
        ),
        (
            lambda processes, rank: share(processes, str(rank), failing if rank == 2 else str),
            [*[f"process 2 on {HOST}: no image"] * 2, "no image"],
        ),
        (lambda processes, rank: compare({"--model.lr": "0.1"}, processes.agree), [None] * 3),
        (
            lambda processes, rank: compare(
                {"--model.lr": "0.1" if rank else "0.2"}, processes.agree
            ),
            [ODD] * 3,
        ),
        (
            lambda processes, rank: compare(
                {} if rank == 1 else {"checkpoint": "last.ckpt"}, processes.agree
            ),
            [LACKS] * 3,
        ),
    ],
)
def test_processes_share_and_compare_before_they_train(
    main: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert together(main, monkeypatch) == expected


@pytest.mark.parametrize("lacking", [None, 1])
def test_a_machine_that_does_not_see_the_folder_of_the_run_is_named(
    lacking: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunLock(tmp_path / "run")
    folders = [tmp_path / ("run" if rank != lacking else "own/run") for rank in range(3)]
    monkeypatch.setattr(machines, "PATIENCE", 0.0)
    answers = together(lambda processes, rank: check_shared(folders[rank], processes), monkeypatch)
    lock.roll_back()
    if lacking is None:
        assert answers == [None] * 3
    else:
        for folder, answer in zip(folders, answers, strict=True):
            assert answer.startswith(f"{HOST} does not see {folder} as {HOST} has it: all machines")


def test_a_file_of_ones_own_is_compared_only_where_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_loss.py"
    path.write_text("x = 1")
    module = SimpleNamespace(__file__=str(path))
    monkeypatch.setitem(sys.modules, "my_loss", cast(Any, module))
    before = own_files()
    path.write_text("x = 2")
    after = own_files()
    assert before.keys() == after.keys()
    name = "your file my_loss.py"
    assert before[name] != after[name]
    for first, second, differs in ((before, after, True), (before, {}, False), ({}, after, False)):
        words = [json.dumps([HOST, facts]) for facts in (first, second)]
        with pytest.raises(UserError, match=name) if differs else nullcontext():
            compare(second, lambda _, words=words: words)


@pytest.mark.parametrize("own", [{"classes": "cat, dog"}, {"classes": "dog, cat"}])
def test_processes_that_lightning_starts_are_compared_once_they_are_connected(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(words: list[str], word: str) -> None:
        words[:] = [json.dumps([HOST, {"classes": "cat, dog"}]), word]

    monkeypatch.setattr(machines.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(machines.dist, "all_gather_object", gather)
    monkeypatch.setattr(machines, "facts", lambda run: run)
    program = SimpleNamespace(processes=Processes())
    [comparison] = callbacks(SimpleNamespace(program=program))
    comparison.run = own
    comparison.setup(SimpleNamespace(world_size=1), None, stage="fit")
    if own["classes"] == "cat, dog":
        comparison.setup(SimpleNamespace(world_size=2), None, stage="fit")
        return
    says = f"process 1 on {HOST} has classes dog, cat, process 0 on {HOST} cat, dog: {SAME}"
    with pytest.raises(UserError, match=re.escape(says)):
        comparison.setup(SimpleNamespace(world_size=2), None, stage="fit")


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
def test_classes_in_another_order_end_a_run_that_lightning_started(
    cait: Cait, tmp_path: Path
) -> None:
    (tmp_path / "of_a_set.py").write_text(OF_A_SET)
    images = ["--data.root=of_a_set:Classes", "--data.batch_size=4", "--run_name=cut"]
    failed = cait("fit", *SMALL, *TWO, *images)
    assert failed.returncode == 2
    says = f"process 1 on {HOST} has classes elm, ash, process 0 on {HOST} ash, elm: {SAME}"
    assert says in failed.stderr
    assert not (tmp_path / "logs/cut").exists()


@pytest.mark.slow
def test_a_node_that_differs_ends_the_run_of_all_before_its_first_step(
    tmp_path: Path, digits_root: Path
) -> None:
    for rank in range(2):  # each works in a folder of its own, as on a node with a disk of its own
        (tmp_path / f"node{rank}").mkdir()
        link_digits(tmp_path / f"node{rank}", digits_root)
    (tmp_path / "apart.sh").write_text(f'cd {tmp_path}/node$RANK && exec {sys.executable} "$@"\n')
    command = (*torchrun("--standalone", "--no_python"), "bash", str(tmp_path / "apart.sh"))
    (tmp_path / "node0/logs").mkdir()
    (tmp_path / "node1/logs").symlink_to(tmp_path / "node0/logs")
    (data := tmp_path / "node1/data/digits").unlink()
    shutil.copytree(digits_root, data)
    next((data / "train/3").iterdir()).unlink()
    says = rf"process 1 on \S+ has training images 1,436 \(\w+\), process 0 on \S+ 1,437 \(\w+\): {SAME}"
    assert re.search(
        says, error_of(start(tmp_path, "fit", *ENDLESS, "--run_name=cut", command=command))
    )
    assert not (tmp_path / "node0/logs/cut").exists()  # its name stays free


def error_of(job: subprocess.Popen[str]) -> str:
    """The error of all processes that came to say one: as one of them said it, or with that one's name in front."""
    output = job.communicate(timeout=LIMIT)[0]
    lines = [
        line.removeprefix("cait: error: ")
        for line in output.splitlines()
        if line.startswith("cait: error:")
    ]
    assert lines, output
    assert job.returncode != 0
    assert "cait/cli" not in output  # no traceback of ours; torchrun shows its own
    assert all(line.endswith(min(lines, key=len)) for line in lines), lines
    return max(lines, key=len)


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
def test_torchruns_processes_train_one_run_by_a_recipe_for_one_device(
    cait: Cait, tmp_path: Path
) -> None:
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

"""What the processes of a run on several machines share, and compare, before they train."""

import hashlib
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

import cait
from cait import disk
from cait.data.folder import FolderSource
from cait.errors import UserError, is_own
from cait.guards.run_lock import STARTING
from cait.plugins import Run
from cait.run.program import Processes
from cait.settings import flatten

MACHINES_OWN = ("data.root", "data.num_workers", "_dir")
"""How settings end that may differ from machine to machine."""
OWN_FILE = "your file"
"""How facts about the user's own files begin. One process may import a file that another does not need."""
PATIENCE = 30.0
"""Seconds for which NFS may not notice a file that another machine has written."""


def list_once(source: Any, processes: Processes) -> None:
    """List the images of class folders in one process of each machine."""
    if type(source) is FolderSource:
        source.table = share(processes, str(source.root), lambda: source.table)


def share(processes: Processes, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns in the first process of each machine that has this `name`; the others read it from a file."""
    scratch = os.stat(gettempdir())  # a container may have one of its own
    machine = json.dumps([socket.gethostname(), scratch.st_dev, scratch.st_ino, os.getcwd(), name])
    first = processes.agree(machine).index(machine)
    with TemporaryDirectory() as folder:
        path = Path(folder, "value")
        if processes.rank() == first:
            path.write_bytes(pickle.dumps(make()))
        paths = processes.agree(str(path))
        # in a folder to which this account alone writes
        with disk.open_file(paths[first]) as file:
            value = pickle.loads(file.read())
        processes.agree()  # the file stays until all have read it
    return value


def check_shared(folder: Path, processes: Processes) -> None:
    """Raise UserError, in all processes, if a machine does not see in a run's folder what the first has written."""
    host = socket.gethostname()
    starting = folder / STARTING
    first_host, lock = json.loads(processes.agree(json.dumps([host, _text(starting)]))[0])
    is_shared = _soon_holds(starting, lock)
    lacking = {*processes.agree("" if is_shared else host)} - {""}
    if lacking:
        raise UserError(
            f"{', '.join(sorted(lacking))} does not see {folder} as {first_host} has it: "
            f"all machines of a run must share {folder.parent}"
        )


def _soon_holds(path: Path, text: str) -> bool:
    """Whether a file has this text, or will have it once the network's file system has noticed."""
    end = time.monotonic() + PATIENCE
    while _text(path) != text:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def _text(path: Path) -> str:
    return disk.read_text(path) if path.is_file() else ""


class Comparison(Callback):
    """Compares the processes that Lightning starts, in the first hook in which they are connected."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.world_size > 1:
            compare(facts(self.run), _gathered)


def _gathered(word: str) -> list[str]:
    """The words of all processes, by rank."""
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, word)
    return words


def compare(facts: Mapping[str, str], agree: Callable[[str], list[str]]) -> None:
    """Raise UserError in all processes about the first fact in which one, maybe on another machine, differs.

    Args:
        agree: gives the words of all processes for that of this one.
    """
    answers = [json.loads(word) for word in agree(json.dumps([socket.gethostname(), dict(facts)]))]
    first_host, expected = answers[0]
    for rank, (host, present) in enumerate(answers):
        for name in [*expected, *present]:
            here, there = present.get(name), expected.get(name)
            may_lack = name.startswith(OWN_FILE) and None in (here, there)
            if here != there and not may_lack:
                raise UserError(
                    f"process {rank} on {host} has {name} {here}, process 0 on {first_host} {there}: "
                    "all processes of a run need the same data, code and settings"
                )


def facts(run: Run) -> dict[str, str]:
    """What all processes of a run must have alike, on whatever machines."""
    settings = flatten(run.config.as_dict())
    shared = {
        f"--{name}": str(value)
        for name, value in settings.items()
        if not name.endswith(MACHINES_OWN)
    }
    others = {
        "code": code_version(),
        "torch": torch.__version__,
        "checkpoint": os.path.basename(run.start),
    }
    return run.data.facts() | others | own_files() | shared


def code_version() -> str:
    """The package's version, with a digest of its source."""
    source = Path(cait.__file__).parent
    files = [
        path
        for path in sorted(source.rglob("*.py"))
        if "tests" not in path.relative_to(source).parts
    ]
    digest = hashlib.sha256("".join(map(disk.read_text, files)).encode())
    return f"{cait.__version__} ({digest.hexdigest()[:16]})"


def own_files() -> dict[str, str]:
    """A digest of each of the user's own files that is imported, by its name."""
    paths = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    # torch has modules that only say that they have a file
    files = [Path(path) for path in paths if is_own(path) and os.path.isfile(path)]
    return {
        f"{OWN_FILE} {path.name}": hashlib.sha256(disk.read_text(path).encode()).hexdigest()[:16]
        for path in files
    }

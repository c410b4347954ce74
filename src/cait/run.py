"""What a run's folder holds, and what its checkpoints hold."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

LOGS = Path("logs")
"""Where the runs are unless `trainer.default_root_dir` says otherwise."""

# In the folder of a run.
CONFIG = "config.yaml"
METRICS = "metrics.csv"
HPARAMS = "hparams.yaml"
CHECKPOINTS = "checkpoints"
EVALUATION = "evaluation.json"
CONSOLIDATED = "consolidated"
EXPORT = "export"
DEMO = "demo"
CARD = "card"
HUB = "hub"
PLOTS = "plots"
REPLAY = "replay"
VALIDATION = "validation.csv"
PER_CLASS = "per_class.csv"
UNREADABLE = "unreadable_images.csv"
NONFINITE = "nonfinite.pt"
MONITOR = "monitor.csv"
THROUGHPUT = "throughput.csv"
LOCK, OWNER, FINISHED = ".lock", ".owner", ".finished"

# In its folder of checkpoints. Each is a file, or a folder that `cait.sharded` wrote.
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
AWAY = ".away.tmp"
"""Suffix of a file or folder that was moved away to make room for another."""

EMA = "EMA"
"""Key of the moving average among the states of the callbacks."""

TENSORS = ("state_dict", "optimizer_states", "callbacks")
"""Keys of a checkpoint that hold nearly all of its size."""

TABLE: Any = dict(newline="", encoding="utf-8", errors="surrogateescape")
"""How files with the names of images are opened: names may hold bytes that are not text."""

Checkpoint = dict[str, Any]

script: str | None = None
"""The user's own file that calls `cait.cli.main` with classes of its own; None under `cait`."""


def find(name: str) -> Path:
    """The folder of a run, given as a name in `LOGS` or as a path.

    Raises:
        UserError: there is no such folder.
    """
    for folder in (LOGS / name, Path(name)):
        if folder.is_dir():
            return folder
    runs = sorted(path.parent.name for path in LOGS.glob(f"*/{CONFIG}"))
    there = f"; {'runs: ' + ', '.join(runs) if runs else 'there are none yet'}"
    raise UserError(f"there is no run {LOGS / name}{did_you_mean(name, runs, there)}")


def command(verb: str, folder: Path, options: str = "") -> str:
    """What to type for a verb of a run, as "make resume RUN=mine"."""
    if script:
        return f"python {script} {verb} {run_argument(folder)} {options}".rstrip()
    return f"make {verb} RUN={run_argument(folder)}" + (f' ARGS="{options}"' if options else "")


def run_argument(folder: Path) -> str:
    """What `make resume RUN=` and `make eval RUN=` take for this folder."""
    return folder.name if folder.parent == LOGS else str(folder)


def scratch(path: Path) -> Path:
    """Where this process writes a file before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: a kill leaves the old file or the new one."""
    beside = scratch(path)
    try:
        yield beside
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table whole."""
    with whole(path) as beside, beside.open("w", **TABLE) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def replace(beside: Path, path: Path, previous: Path | None = None) -> None:
    """Move the file or folder `beside` to `path`, and keep what was at `path` as `previous`.

    A kill at any moment leaves the old one or the new one. No rename replaces a folder, so the one that has to go is
    moved away first. After a kill between those renames, `clear_scratch` puts it back.
    """
    if any(place is not None and place.is_dir() for place in (beside, path, previous)):
        _replace_folder(beside, path, previous)
        return
    if previous is not None and path.exists():
        _keep(path, previous)
    os.replace(beside, path)
    flush(path.parent)


def _keep(path: Path, previous: Path) -> None:
    """Give the file at `path` the name `previous` too."""
    link = scratch(previous)
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: `path` is missing until the new file takes its place
        os.replace(path, previous)
    else:
        os.replace(link, previous)


def _replace_folder(beside: Path, path: Path, previous: Path | None) -> None:
    if beside.is_dir():
        flush(beside)
    goes = previous or path
    away = goes.with_name(f".{goes.name}{AWAY}")
    remove(away)
    if path.exists():
        if goes.exists():
            goes.rename(away)
        if previous is not None:
            path.rename(previous)
    beside.rename(path)
    flush(path.parent)
    with suppress(OSError):  # NFS keeps a folder that somebody reads; `clear_scratch` comes back to it
        remove(away)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_scratch(folder: Path) -> None:
    """Remove what killed processes left half written, and put back what they had moved away."""
    for path in list(folder.rglob(".*.tmp")):
        place = path.with_name(path.name.removeprefix(".").removesuffix(AWAY))
        if path.name.endswith(AWAY) and not place.exists():
            path.rename(place)
            continue
        with suppress(OSError):  # a process that has lost process 0 may still write there
            remove(path)


def config(folder: Path) -> Path:
    """The configuration of a run.

    Raises:
        UserError: the folder has none.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{path} is missing, so nothing says what the run was")
    return path


def best_checkpoint(folder: Path, purpose: str) -> Path:
    """`best.ckpt`, or `last.ckpt` of a run that was never validated.

    Raises:
        UserError: the run has neither; the error names the `purpose`, such as "score".
    """
    for name in (BEST, f".{BEST}{AWAY}", LAST):  # the second exists for a moment, while a folder replaces the best
        path = folder / CHECKPOINTS / name
        if path.exists():
            return path
    raise UserError(f"nothing to {purpose}: {folder} has no checkpoint yet")


def read_checkpoint(path: str | Path, without: Sequence[str] = ()) -> Checkpoint:
    """Read a checkpoint without running code from it.

    The tensors of a file stay on disk. Those of a folder are read whole, except under the keys `without`, such as
    "optimizer_states": there None takes their place.

    Raises:
        UserError: the file or folder is not a whole checkpoint of a run.
    """
    import torch

    try:
        if Path(path).is_dir():
            from cait import sharded

            checkpoint = sharded.read(Path(path), without=without)
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        checkpoint["global_step"], checkpoint["state_dict"]
    except Exception as error:
        raise UserError(f"{path} is not a whole checkpoint of a run") from error
    return checkpoint


def is_checkpoint(content: Any) -> bool:
    """Whether the content of a file is a checkpoint of a run."""
    return isinstance(content, dict) and "pytorch-lightning_version" in content


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights of the network under its own names."""
    prefix = "model."
    state = checkpoint["state_dict"]
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def average(checkpoint: Checkpoint) -> dict[str, Tensor] | None:
    """The moving average of the weights, under the network's names; None if the run kept none."""
    return checkpoint.get("callbacks", {}).get(EMA) or None


def data_state(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The data module's part of a checkpoint, whatever its class is called; None if there is no such part."""
    key = _data_key(checkpoint)
    return None if key is None else checkpoint[key]


def class_names(checkpoint: Checkpoint) -> list[str] | None:
    """The names of the classes, in the order of the logits; None if the checkpoint has no data module."""
    state = data_state(checkpoint)
    return None if state is None else state["class_names"]


def rename_data_state(checkpoint: Checkpoint, name: str) -> None:
    """Put the data module's part under `name`: Lightning looks for the `__qualname__` of the class in use."""
    key = _data_key(checkpoint)
    if key is not None:
        checkpoint[name] = checkpoint.pop(key)


def _data_key(checkpoint: Checkpoint) -> str | None:
    """The key of the data module's part: it has the "class_names" and, except in old checkpoints, "depends_on"."""
    settings = ("hyper_parameters", "datamodule_hyper_parameters")  # a user's own settings may name classes too
    found = [
        key
        for key, part in checkpoint.items()
        if key not in settings and isinstance(part, dict) and isinstance(part.get("class_names"), list)
    ]
    return next((key for key in found if "depends_on" in checkpoint[key]), found[0] if found else None)

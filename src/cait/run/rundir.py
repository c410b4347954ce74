"""What a run's folder holds: the names in it, and which folder a name means."""

import contextlib
import itertools
import os
from pathlib import Path

from cait.data import listing
from cait.data.listing import CHECKPOINTS, CONFIG
from cait.data.listing import LOCK as LOCK
from cait.disk import check_inside
from cait.errors import CONTROL, UserError, did_you_mean

LOGS = Path(listing.LOGS)
"""Where the runs are unless `trainer.default_root_dir` says otherwise."""
# In the folder of a run, beside the names that tell it from a folder of images.
METRICS = "metrics.csv"
EVALUATION = "evaluation.json"
VALIDATION = "validation.csv"
UNREADABLE = "unreadable_images.csv"
NONFINITE = "nonfinite.pt"
FINISHED = ".finished"
# In its folder of checkpoints.
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


def folder_of(name: str) -> Path:
    """The folder of a run, given as a name in `LOGS` or as a path.

    Raises UserError if there is no such folder, or it leads out of itself, see `cait.disk.check_inside`.
    """
    is_path = name.partition(os.sep)[0] in ("", ".", "..")
    in_logs = LOGS / name
    elsewhere = Path(name)
    if in_logs.is_dir() and not is_path:
        return _check_folder(in_logs)
    if elsewhere.is_dir():
        return _check_folder(elsewhere)
    runs = sorted(path.parent.name for path in LOGS.glob(f"*/{CONFIG}"))
    others = (
        f"; runs: {', '.join(runs)}"
        if runs
        else f"; there are none in {LOGS.absolute()}: change to the folder that has {LOGS}/, or give the run's path"
    )
    missing = elsewhere if LOGS in elsewhere.parents else in_logs
    raise UserError(f"there is no run {missing}{did_you_mean(missing.name, runs, others)}")


def _check_folder(folder: Path) -> Path:
    if folder.name in ("", ".."):  # as "." has it; the run has a name
        folder = folder.absolute().resolve()
    if CONTROL.search(folder.resolve().name):
        raise UserError(f"{folder} has a control character in its name: rename it")
    check_inside(folder)
    return folder


def new_folder(root: Path, base: str, make: bool = True) -> Path:
    """The first folder of `base`, `base-2`, `base-3`, ... that is not there yet; made for this run alone."""
    for number in itertools.count(1):
        folder = root / (base if number == 1 else f"{base}-{number}")
        if os.path.lexists(folder):
            continue
        if not make:
            break
        with contextlib.suppress(FileExistsError):  # another run has just made it
            folder.mkdir(parents=True)
            break
    return folder


class FolderGuard:
    """Tells whether a folder is still where it was, and is not another one of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = _number(folder)

    def is_gone(self) -> bool:
        return _number(self.folder) != self._number

    def check(self) -> None:
        """Raise UserError if the folder has gone since."""
        if self.is_gone():
            raise UserError(
                f"the folder {self.folder} was moved or removed during training: "
                "put it back, or continue by its new path"
            )


def _number(folder: Path) -> int:
    """What a file system calls a folder; 0 if there is none."""
    return folder.stat().st_ino if folder.is_dir() else 0


def run_argument(folder: Path) -> str:
    """What `make resume RUN=` and `make eval RUN=` take for this folder."""
    if folder.parent == LOGS:
        return folder.name
    # alone it would be a name in `LOGS`
    return f"./{folder}" if folder.parent == Path() else str(folder)


def find_run(checkpoint: str | Path) -> Path | None:
    """The folder of the run in which a checkpoint lies, if it does."""
    folder = Path(checkpoint).absolute().parent
    if folder.name != CHECKPOINTS or not (folder.parent / CONFIG).is_file():
        return None
    return Path(os.path.relpath(folder.parent))


def config(folder: Path) -> Path:
    """The configuration of a run. Raises UserError if the folder has none."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{path} is missing, so nothing says what the run was")
    return path


def is_of_run(path: Path) -> bool:
    """Whether a file is the configuration of a run, and not the user's own of that name, as Hydra has it."""
    beside = (path.with_name(CHECKPOINTS), path.with_name(LOCK))
    return path.name == CONFIG and any(map(Path.exists, beside))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints from which a run may go on, the first choice first: its last ones, then the newest of the others.

    `folder` is theirs. Raises OSError if it cannot be listed. A run may have `best.ckpt` alone at first.
    """
    if not folder.exists():
        return []
    paths = [path for path in folder.iterdir() if path.suffix == ".ckpt"]
    return sorted(
        paths, key=lambda path: (path.name != LAST, path.name != PREVIOUS, -path.stat().st_mtime)
    )


def best_checkpoint(folder: Path, purpose: str) -> Path:
    """`best.ckpt`, or `last.ckpt` of a run that was never validated.

    Raises UserError if the run has neither; the error names the `purpose`, such as "score".
    """
    for name in (BEST, LAST):
        path = folder / CHECKPOINTS / name
        if path.exists():
            return path
    raise UserError(f"nothing to {purpose}: {folder} has no checkpoint yet")

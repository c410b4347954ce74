"""The image files of class folders: what below a root is data, and how its names are written."""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cait.errors import UserError
from cait.signature import CONFIG as CONFIG

HEIF = (".heic", ".heif")
"""Suffixes of the photographs that iPhones take; pillow-heif reads them."""
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif"),
    *(HEIF if find_spec("pillow_heif") else ()),
)
"""Suffixes of image names, in lower case. Only the first frame of a GIF file is read."""
ARRAYS = (".npy", ".dcm", ".dicom")
"""Suffixes of what a `reader` may read; they are listed where there is nothing else."""
OTHER, BROKEN, BESIDE = "other files", "broken links", "images beside the class folders"
"""Why something is left out; what is hidden is not mentioned."""
HIDDEN = (
    ".",
    "__pycache__",
    "__MACOSX",
    "@eaDir",
    "#recycle",
    "@Recycle",
    "$RECYCLE",
    "System Volume",
    "lost+found",
)
"""Prefixes of names that programs make: Python, viewers, macOS's archives, disks of Synology, QNAP, Windows, ext4."""
THREADS = 8  # a server in the network answers many at a time; a local disk loses half a second in a million files
Identity = tuple[int, int]
"""Device and number of a folder, the same whatever leads to it."""
LeftOut = dict[str, list[str]]
"""Paths of what is not listed, by the reason."""
Labeled = tuple[str, int]
"""The path of an image, and the index of its class."""
LOGS, LOCK, CHECKPOINTS = "logs", ".lock", "checkpoints"
"""The folder of runs, and what lies in the folder of a run; see `cait.run.rundir`."""
FEW = 16
"""Images that may lie beside runs: a folder of more is one of images."""


def below(root: str | Path, path: str) -> str:
    """The part of a path below `root`, as tables and digests have it."""
    return path.removeprefix(os.path.join(root, ""))


def below_root(root: str | Path, path: str) -> str:
    """The part below `root` of a path that somebody wrote, absolute or from `root` on."""
    normal = os.path.normpath(path)
    if os.path.isabs(normal) or normal.startswith(os.pardir):
        return os.path.relpath(os.path.join(root, normal), root)
    return normal


def composed(name: str) -> str:
    """A name in which each letter with an accent is one sign (NFC)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def spelled(folder: Path, name: str) -> str:
    """The path of a file below a folder, composed as it is there; as it is given if there is no such file."""
    if name.isascii() or (folder / name).exists():
        return name
    path = Path()
    for step in Path(name).parts:
        # of Linux, and of a Mac
        forms = (unicodedata.normalize(form, step) for form in ("NFC", "NFD"))
        path /= next((form for form in forms if (folder / path / form).exists()), step)
    return str(path)


def list_images(folder: Path, names: Sequence[str], left_out: LeftOut) -> Iterator[Labeled]:
    """The images of the folders `names`, in the order of torchvision's ImageFolder; name i has the label i.

    Links are followed, and each folder is listed once. What is `HIDDEN` is left out, because viewers put small copies
    there. A pipe or a broken link with the name of an image is one that cannot be read. Where there are no images,
    `ARRAYS` are listed. Raises UserError if a folder cannot be listed, or lies under two classes.
    """
    has_images = False
    others: list[Labeled] = []
    for path, label in _list_files(folder, names):
        if is_image(path):
            has_images = True
            yield path, label
        else:
            others.append((path, label))
    for path, label in others:
        if not has_images and path.lower().endswith(ARRAYS):
            yield path, label
        else:
            left_out[OTHER if os.path.exists(path) else BROKEN].append(path)


def _list_files(folder: Path, names: Sequence[str]) -> Iterator[Labeled]:
    """The files of the folders `names`, with the index of the name."""
    order = sorted(range(len(names)), key=names.__getitem__)
    owners: dict[Identity, tuple[int, str]] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        trees = pool.map(_list_tree, [os.path.join(folder, names[label]) for label in order])
        for label, tree in zip(order, trees, strict=True):
            for inner, identity, files in sorted(tree):
                owner, other = owners.setdefault(identity, (label, inner))
                if owner != label:
                    raise UserError(
                        f"{other} and {inner} are one folder, under two classes: remove the link"
                    )
                prefix = os.path.join(inner, "")  # once: a join for each of a million files is slow
                for name in files:
                    yield prefix + name, label


def _list_tree(folder: str) -> list[tuple[str, Identity, list[str]]]:
    """The folders in a folder, each once whatever links lead to it, and the names of the files in each."""
    tree = []
    seen: set[Identity] = set()
    waiting = [folder]
    for inner in waiting:
        status = os.stat(inner)
        identity = (status.st_dev, status.st_ino)
        if identity not in seen:
            seen.add(identity)
            folders, files = entries(inner)
            tree.append((inner, identity, files))
            waiting += [os.path.join(inner, name) for name in folders]
    return tree


def entries(folder: str | Path) -> tuple[list[str], list[str]]:
    """The sorted names of the folders in a folder, links to folders among them, and of all else that is not hidden.

    What runs have written is no data either: folders of runs are left out. Raises UserError if the folder cannot be
    listed.
    """
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as listing:
            visible = [entry for entry in listing if not entry.name.startswith(HIDDEN)]
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}") from error
    for entry in visible:
        if not _is_folder(entry):
            files.append(entry.name)
        elif not _holds_runs(entry.path):
            folders.append(entry.name)
    return sorted(folders), sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # as of a link that leads to itself
        return entry.is_dir()
    return False


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _holds_runs(folder: str) -> bool:
    """Whether a folder is a run's, or has runs in it. A class may have the name of one: it has images."""
    if _is_run(folder):
        return True
    is_logs = os.path.basename(folder) == LOGS and os.path.realpath(folder) == os.path.realpath(
        LOGS
    )
    images = 0
    folders: list[str] = []
    with suppress(OSError):
        if os.stat(folder).st_nlink == 2 and not is_logs:  # no folder in it; btrfs counts otherwise
            return False
        with os.scandir(folder) as listing:
            for entry in listing:
                if is_image(entry.name):
                    images += 1
                elif _is_folder(entry):
                    folders.append(entry.path)
                if images > FEW:
                    return False
    if any(map(_is_run, folders)):
        return True
    if images:
        return False
    unlinked = [path for path in folders if not os.path.islink(path)]
    return is_logs or (bool(unlinked) and all(map(_holds_runs, unlinked)))


def _is_run(folder: str) -> bool:
    files = {
        name for name in (LOCK, CONFIG, CHECKPOINTS) if os.path.exists(os.path.join(folder, name))
    }
    return LOCK in files or {CONFIG, CHECKPOINTS} <= files

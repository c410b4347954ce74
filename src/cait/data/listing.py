"""The image files of class folders: what below a root is data, and which files have the same bytes."""

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from cait import disk
from cait.errors import UserError

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
HIDDEN = (".", "__pycache__", "__MACOSX", "@eaDir", "#recycle", "@Recycle", "$RECYCLE", "System Volume", "lost+found")
"""Prefixes of names that programs make: Python, viewers, macOS's archives, disks of Synology, QNAP, Windows, ext4."""
THREADS = 8  # a server in the network answers many at a time; a local disk loses half a second in a million files
Identity = tuple[int, int]
"""Device and number of a folder, the same whatever leads to it."""
LOGS, LOCK, CONFIG, CHECKPOINTS = "logs", ".lock", "config.yaml", "checkpoints"
"""The folder of runs, and what lies in the folder of a run; see `cait.run.rundir`."""
FEW = 16
"""Images that may lie beside runs: a folder of more is one of images."""
PART = 1 << 12
"""Bytes in the middle of a file that are compared before the whole."""


class Files:
    """Paths of images and the indices of their classes, as `cait.data.dataset.Samples`.

    They lie in three arrays. A list of a million tuples would be copied into every worker, page by page,
    because reading an object changes its reference count.

    Args:
        samples: pairs of a path and the index of its class.
        folder: what the paths begin from.
    """

    def __init__(self, samples: Iterable[tuple[str, int]], folder: str = "") -> None:
        self._folder = os.path.join(folder, "") if folder else ""
        self.left_out = defaultdict[str, list[str]](list)
        """Paths below `folder` of what is not listed, by the reason."""
        paths = bytearray()
        self.labels = array("q")
        """The index of each image's class."""
        self.ends = array("q", [0])
        """Where each path begins in `paths`, and the last one ends."""
        for path, label in samples:
            paths += os.fsencode(path)
            self.ends.append(len(paths))
            self.labels.append(label)
        self.paths = bytes(paths)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.name(index), self.labels[index]

    def name(self, index: int) -> str:
        return self._folder + os.fsdecode(self.paths[self.ends[index] : self.ends[index + 1]])


def below(root: str | Path, path: str) -> str:
    """The part of a path below `root`, as tables and digests have it."""
    return path.removeprefix(os.path.join(root, ""))


def list_images(folder: Path, names: Sequence[str], suffixes: tuple[str, ...] = EXTENSIONS) -> Files:
    """The images of the folders `names`, in the order of torchvision's ImageFolder; name i has the label i.

    Links are followed, and each folder is listed once. What is `HIDDEN` is left out, because viewers put small copies
    there. A pipe or a broken link with the name of an image is one that cannot be read. Raises UserError if a folder
    cannot be listed, or lies under two classes.
    """
    order = sorted(range(len(names)), key=lambda label: names[label])
    start = len(os.path.join(folder, ""))
    owners: dict[Identity, tuple[int, str]] = {}
    left_out = defaultdict[str, list[str]](list)

    def samples() -> Iterator[tuple[str, int]]:
        with ThreadPoolExecutor(THREADS) as pool:
            trees = pool.map(_tree, [os.path.join(folder, names[label]) for label in order])
            for label, tree in zip(order, trees, strict=True):
                for place, identity, files in sorted(tree):
                    owner, other = owners.setdefault(identity, (label, place))
                    if owner != label:
                        raise UserError(f"{other} and {place} are one folder, under two classes: remove the link")
                    for name in files:
                        path = os.path.join(place, name)
                        if name.lower().endswith(suffixes):
                            yield path[start:], label
                        else:
                            left_out[OTHER if os.path.exists(path) else BROKEN].append(path[start:])

    found = Files(samples(), str(folder))
    found.left_out = left_out
    return found if found or suffixes == ARRAYS else list_images(folder, names, ARRAYS)


def _tree(folder: str) -> list[tuple[str, Identity, list[str]]]:
    """The folders in a folder, each once whatever links lead to it, and the names of the files in each."""
    found = []
    seen: set[Identity] = set()
    waiting = [folder]
    for place in waiting:
        status = os.stat(place)
        identity = (status.st_dev, status.st_ino)
        if identity not in seen:
            seen.add(identity)
            folders, files = entries(place)
            found.append((place, identity, files))
            waiting += [os.path.join(place, name) for name in folders]
    return found


def entries(folder: str | Path) -> tuple[list[str], list[str]]:
    """The sorted names of the folders in a folder, links to folders among them, and of all else that is not hidden.

    What runs have written is no data either: folders of runs are left out. Raises UserError if the folder cannot be
    listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}") from error

    _, folders, others = next(os.walk(folder, onerror=refuse))
    folders, others = (sorted(name for name in names if not name.startswith(HIDDEN)) for names in (folders, others))
    return [name for name in folders if not _of_runs(os.path.join(folder, name))], others


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _of_runs(folder: str) -> bool:
    """Whether a folder is a run's, or one of runs. A class may have the name of one: it has images."""
    if _is_run(folder):
        return True
    is_logs = os.path.basename(folder) == LOGS and os.path.realpath(folder) == os.path.realpath(LOGS)
    images, inner, has_runs = 0, list[str](), False
    with suppress(OSError):
        if os.stat(folder).st_nlink == 2 and not is_logs:  # no folder in it; btrfs counts otherwise
            return False
        with os.scandir(folder) as found:
            for entry in found:
                if is_image(entry.name):
                    images += 1
                    if images > FEW:
                        return False
                elif entry.is_dir():
                    has_runs = has_runs or _is_run(entry.path)
                    inner += [] if entry.is_symlink() else [entry.path]
    return has_runs or (not images and (is_logs or (bool(inner) and all(map(_of_runs, inner)))))


def _is_run(folder: str) -> bool:
    def has(name: str) -> bool:
        return os.path.exists(os.path.join(folder, name))

    return has(LOCK) or (has(CONFIG) and has(CHECKPOINTS))


def same_bytes(
    name: Callable[[int], str], count: int, shown: Callable[[list[int], str], Iterable[int]] = lambda all_, _: all_
) -> list[list[int]]:
    """The places of files that have the same bytes, two or more at a time, each time in order.

    Only a file whose size another has is opened, and only one whose middle another has too is read whole. A file that
    cannot be read has no like. `name` gives the path at each of `count` places; `shown` gives back the places that it
    gets, and shows how far they are under the title that it gets.
    """
    groups = [[*range(count)]]
    middle = partial(_digest, part=PART)  # files that are not compressed often begin alike
    for title, look in (("sizes", _size), ("parts", middle), ("contents", _digest)):
        group_of = {place: number for number, group in enumerate(groups) for place in group}
        alike = defaultdict[tuple[int, int], list[int]](list)
        for place in shown([*group_of], title):
            if (found := look(name(place))) >= 0:
                alike[group_of[place], found].append(place)
        groups = [group for group in alike.values() if len(group) > 1]
    return groups


def _size(path: str) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return -1


def _digest(path: str, part: int | None = None) -> int:
    """63 bits that differ with the bytes of a file, or of a part in its middle; -1 if it cannot be read."""
    digest = blake2b(digest_size=8)
    with suppress(OSError, UserError), disk.open_file(path) as file:
        if part is not None:
            file.seek(max(0, (os.fstat(file.fileno()).st_size - part) // 2))
            digest.update(file.read(part))
        else:
            while block := file.read(1 << 20):
                digest.update(block)
        return int.from_bytes(digest.digest()) >> 1
    return -1

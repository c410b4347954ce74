"""The image files of class folders."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from importlib.util import find_spec
from pathlib import Path

from cait.errors import UserError

HEIF = (".heic", ".heif")
"""Suffixes of the photographs that iPhones take; pillow-heif reads them."""
TORCHVISIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
EXTENSIONS = (*TORCHVISIONS, ".gif", ".avif", *(HEIF if find_spec("pillow_heif") else ()))
"""Suffixes of image names, in lower case. Only the first frame of a GIF file is read."""
THREADS = 8  # a server in the network answers many at a time; a local disk loses half a second in a million files

Identity = tuple[int, int]
"""Device and number of a file or folder, the same whatever leads to it."""
Folders = dict[Identity, tuple[int, str]]
"""The label of each folder, and a path that leads to it."""
LeftOut = defaultdict[str, list[str]]
FOLDER, IMAGE, NOTHING = "folders", "images", ""
HIDDEN, BROKEN, AGAIN = "hidden", "broken links", "links to what is there already"
OTHER, BESIDE = "other files", "images beside the class folders"
"""What an entry of a folder is; the last five are why something is left out."""


def is_image(name: str) -> bool:
    """Whether a file of this name or path is listed as an image."""
    return name.lower().endswith(EXTENSIONS) and name[name.rfind(os.sep) + 1] != "."


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
        self.left_out = LeftOut(list)
        """Paths below `folder` of what is not listed, by the reason."""
        self.folders: Folders = {}
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


def list_images(folder: Path, names: Sequence[str]) -> Files:
    """The images of the class folders `names`, in the order of torchvision's ImageFolder; name i has the label i.

    Links are followed, and each file is listed once, whatever leads to it. Hidden files and folders, whose names begin
    with a dot, are left out, because viewers put small copies there. A pipe or a broken link with the name of an image
    is one that cannot be read.

    Raises:
        UserError: a folder cannot be listed, or a folder or file lies under two classes.
    """
    files = walk(folder, names)
    with os.scandir(folder) as entries:
        for entry in entries:
            what = {IMAGE: BESIDE, FOLDER: NOTHING, OTHER: NOTHING}.get(found := entry_kind(entry), found)
            if what:
                files.left_out[what].append(entry.name)
    return files


def walk(folder: Path, names: Sequence[str]) -> Files:
    """The images as `list_images` gives them, without a look at what lies beside the class folders."""
    order = sorted(range(len(names)), key=lambda label: names[label])
    start = len(os.path.join(folder, ""))
    folders, left_out = Folders(), LeftOut(list)
    numbers, links = array("Q"), set[int]()

    def samples() -> Iterator[tuple[str, int]]:
        with ThreadPoolExecutor(THREADS) as pool:
            listed = pool.map(_Tree, [os.path.join(folder, names[label]) for label in order])
            for label, tree in zip(order, listed, strict=True):
                join(folders, {identity: (label, inner) for identity, inner in tree.folders.items()})
                for kind, paths in tree.left_out.items():
                    left_out[kind] += [path[start:] for path in paths]
                for inner, images in sorted(tree.images.items()):
                    below, first = os.path.join(inner, "")[start:], len(numbers)
                    names_here = sorted(images)
                    if linked := tree.links.get(inner):
                        links.update(first + place for place, name in enumerate(names_here) if name in linked)
                    numbers.extend(map(images.__getitem__, names_here))
                    yield from ((below + name, label) for name in names_here)

    files = Files(samples(), str(folder))
    if again := _again(files, numbers, links) if links else None:
        left_out[AGAIN] += [files.name(index)[start:] for index in sorted(again)]
        kept = [(path[start:], label) for index, (path, label) in enumerate(files) if index not in again]
        files = Files(kept, str(folder))
    files.left_out, files.folders = left_out, folders
    return files


def join(folders: Folders, more: Folders) -> None:
    """Add folders to others. Raises UserError if one of them is there under another label."""
    for identity, (label, path) in more.items():
        known, place = folders.setdefault(identity, (label, path))
        if known != label:
            raise UserError(f"{place} and {path} are one folder, under two classes: remove the link")


def _again(files: Files, numbers: Sequence[int], links: set[int]) -> set[int]:
    """The images that are listed before. Of a file and a link to it the link is.

    Args:
        numbers: of the files on their devices.
        links: the images that are links to files.
    """
    wanted, places = {numbers[index] for index in links}, defaultdict[Identity, list[int]](list)
    for index, number in enumerate(numbers):
        if number in wanted:
            places[_identity(os.stat(files.name(index)))].append(index)
    for indices in places.values():
        indices.sort(key=lambda index: (index in links, index))
        first = indices.pop(0)
        for index in indices:
            if files.labels[index] != files.labels[first]:
                names = f"{files.name(first)} and {files.name(index)}"
                raise UserError(f"{names} are one file, under two classes: remove the link")
    return {index for indices in places.values() for index in indices}


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


class _Tree:
    """What lies below a folder. Links to folders are followed last, so that an image is listed in its own place.

    Raises:
        UserError: a folder cannot be listed.
    """

    def __init__(self, folder: str) -> None:
        self.folders: dict[Identity, str] = {}
        self.left_out = LeftOut(list)
        self.images = defaultdict[str, dict[str, int]](dict)
        """The name of each image in a folder, and its number on the device."""
        self.links = defaultdict[str, set[str]](set)
        """The names of those that are links."""
        self._inner, self._linked = [folder], list[str]()
        try:
            while self._inner or self._linked:
                self._list(self._inner.pop() if self._inner else heappop(self._linked))
        except OSError as error:
            raise UserError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    def _list(self, folder: str) -> None:
        status = os.stat(folder)
        if self.folders.setdefault(_identity(status), folder) != folder:
            self.left_out[AGAIN].append(folder)
            return
        images = self.images[folder]
        with os.scandir(folder) as entries:  # it tells folders from files without asking for each
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and is_image(entry.name):  # nearly all
                    images[entry.name] = entry.inode()
                elif (what := entry_kind(entry)) == IMAGE:
                    images[entry.name] = 0
                    if os.path.exists(entry.path):
                        images[entry.name] = entry.stat().st_ino
                        self.links[folder].add(entry.name)
                elif what == FOLDER:
                    heappush(self._linked, entry.path) if entry.is_symlink() else self._inner.append(entry.path)
                elif what:
                    self.left_out[what].append(entry.path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is one too, or a link to one."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def entry_kind(entry: os.DirEntry[str]) -> str:
    """What an entry of a folder is, with links followed; it asks the disk for links alone."""
    if entry.name.startswith("."):
        is_named = entry.name.lower().endswith(EXTENSIONS)
        return HIDDEN if is_named or entry.is_dir(follow_symlinks=False) else NOTHING
    if is_folder(entry):
        return FOLDER
    if is_image(entry.name):
        return IMAGE
    return BROKEN if entry.is_symlink() and not os.path.exists(entry.path) else OTHER

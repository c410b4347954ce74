"""The image files of class folders."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HEIF = (".heic", ".heif")
"""Suffixes of the photographs that iPhones take; pillow-heif reads them."""
TORCHVISIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
EXTENSIONS = (*TORCHVISIONS, ".gif", ".avif", *(HEIF if find_spec("pillow_heif") else ()))
"""Suffixes of image names, in lower case. Only the first frame of a GIF file is read."""
THREADS = 8  # a server in the network answers many at a time; a local disk loses half a second in a million files


def is_image(name: str) -> bool:
    """Whether a file of this name or path is listed as an image."""
    return name.lower().endswith(EXTENSIONS) and not os.path.basename(name).startswith(".")


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

    Hidden files and folders, whose names begin with a dot, are left out: viewers put small copies there.
    """
    order = sorted(range(len(names)), key=lambda label: names[label])
    start = len(os.path.join(folder, ""))
    with ThreadPoolExecutor(THREADS) as pool:
        listed = pool.map(_walk, [os.path.join(folder, names[label]) for label in order])
        samples = ((path[start:], label) for label, paths in zip(order, listed, strict=True) for path in paths)
        return Files(samples, str(folder))


def _walk(folder: str) -> list[str]:
    paths = []
    for inner, _, files in sorted(os.walk(folder, followlinks=True)):
        if f"{os.sep}." not in inner[len(folder) :]:
            paths += [os.path.join(inner, name) for name in sorted(files) if is_image(name)]
    return paths

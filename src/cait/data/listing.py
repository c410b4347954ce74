"""The images of class folders, listed once: a long listing is kept for the next start."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS as TORCHVISIONS

from cait import disk

HEIF = (".heic", ".heif")
"""Suffixes of the photographs that iPhones take; pillow-heif reads them."""
EXTENSIONS = (*TORCHVISIONS, ".gif", ".avif", *(HEIF if find_spec("pillow_heif") else ()))
"""Suffixes of image names, in lower case. Only the first frame of a GIF file is read."""
KEPT_FROM = 10_000
"""Shorter listings take no time, and are not kept."""
SETTLED = 2_000_000_000
"""Nanoseconds that a folder must have been left alone: a change right after it was listed may not change its time."""
THREADS = 8  # a server in the network answers many at a time; a local disk loses half a second in a million files

Times = list[tuple[str, int]]
"""Folders and when each changed last, in nanoseconds."""


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
        self._ends = array("q", [0])
        for path, label in samples:
            paths += os.fsencode(path)
            self._ends.append(len(paths))
            self.labels.append(label)
        self._paths = bytes(paths)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.name(index), self.labels[index]

    def name(self, index: int) -> str:
        return self._folder + os.fsdecode(self._paths[self._ends[index] : self._ends[index + 1]])

    def arrays(self) -> dict[str, Any]:
        """What `from_arrays` takes."""
        return {"paths": np.frombuffer(self._paths, np.uint8), "ends": self._ends, "labels": self.labels}

    @classmethod
    def from_arrays(cls, folder: str, paths: Any, ends: Any, labels: Any) -> Files:
        files = cls((), folder)
        files._paths, files._ends, files.labels = paths.tobytes(), array("q"), array("q")
        files._ends.frombytes(ends.tobytes())
        files.labels.frombytes(labels.tobytes())
        return files


def list_images(folder: Path, names: Sequence[str]) -> Files:
    """The images of the class folders `names`, in the order of torchvision's ImageFolder; name i has the label i.

    Hidden files and folders, whose names begin with a dot, are left out: viewers put small copies there.
    A listing of many images is kept below ~/.cache/cait. It is reused as long as no folder has changed.
    """
    kept = _kept(folder, names)
    with ThreadPoolExecutor(THREADS) as pool:
        found = _read(kept, folder, pool)
        if found is None:
            start = time.time_ns()
            found, times = _list(folder, names, pool)
            changed = {when for _, when in times}
            # File systems that show buckets as folders may give all of them the same time.
            if len(found) >= KEPT_FROM and len(changed) > 1 and max(changed) < start - SETTLED:
                _keep(kept, found, times)
    return found


def _kept(folder: Path, names: Sequence[str]) -> Path:
    key = "\0".join([str(folder.absolute()), *EXTENSIONS, "", *names])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cait/listings" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.npz"


def _list(folder: Path, names: Sequence[str], pool: ThreadPoolExecutor) -> tuple[Files, Times]:
    order = sorted(range(len(names)), key=lambda label: names[label])
    start = len(os.path.join(folder, ""))
    times: Times = []

    def samples() -> Iterator[tuple[str, int]]:
        listed = pool.map(_walk, [os.path.join(folder, names[label]) for label in order])
        for label, (paths, changed) in zip(order, listed, strict=True):
            times.extend((inner[start:], when) for inner, when in changed)
            yield from ((path[start:], label) for path in paths)

    return Files(samples(), str(folder)), times


def _walk(folder: str) -> tuple[list[str], Times]:
    paths, times = [], []
    for inner, _, files in sorted(os.walk(folder, followlinks=True)):
        if f"{os.sep}." in inner[len(folder) :]:
            continue
        times.append((inner, os.stat(inner).st_mtime_ns))
        paths += [os.path.join(inner, name) for name in sorted(files) if is_image(name)]
    return paths, times


def _keep(kept: Path, files: Files, times: Times) -> None:
    folders = np.frombuffer(b"\0".join(os.fsencode(inner) for inner, _ in times), np.uint8)
    with suppress(OSError):  # the home may be full or read-only
        kept.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(kept) as beside, beside.open("wb") as file:
            np.savez(file, folders=folders, changed=[changed for _, changed in times], **files.arrays())


def _read(kept: Path, folder: Path, pool: ThreadPoolExecutor) -> Files | None:
    """The kept listing, None if there is none or a folder has changed since."""
    try:
        with np.load(kept) as found:
            content = dict(found)
        folders = [os.path.join(folder, os.fsdecode(inner)) for inner in content.pop("folders").tobytes().split(b"\0")]
        changed = content.pop("changed")
        now = pool.map(lambda inner: os.stat(inner).st_mtime_ns, folders, chunksize=64)
        if not np.array_equal(changed, np.fromiter(now, np.int64)):
            return None
        return Files.from_arrays(str(folder), **content)
    except Exception:  # a torn file raises many kinds; the listing is made anew
        return None

"""Image folders: which pictures there are, and reading one."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from cait.data.faults import Faults
from cait.errors import UserError

Source = str | Path | IO[bytes] | Image.Image
"""A picture as a data set has it: a path, an open file, or decoded already."""


class Files:
    """Paths of images and the indices of their classes, as `cait.data.dataset.Samples` has them.

    They lie in three arrays. A list of a million tuples would be copied into every worker, page by page,
    because reading an object changes its reference count.
    """

    def __init__(self, samples: Iterable[tuple[str, int]]) -> None:
        paths, labels = bytearray(), array("l")
        ends = array("q", [0])
        for path, label in samples:
            paths += os.fsencode(path)
            ends.append(len(paths))
            labels.append(label)
        self._paths, self._ends, self._labels = bytes(paths), ends, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return map(self.source, range(len(self)))

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[self._ends[index] : self._ends[index + 1]])

    def source(self, index: int) -> tuple[str, int]:
        return self.name(index), self._labels[index]


def load_rgb(picture: Source, name: str = "") -> Image.Image:
    """Read a picture in any of Pillow's formats and modes as RGB; `name` stands in errors for one without a path.

    Raises:
        UserError: the file is missing, truncated or not a picture.
    """
    try:
        with picture if isinstance(picture, Image.Image) else Image.open(picture) as image:
            if image.mode == "P" and "transparency" in image.info:
                return image.convert("RGBA").convert("RGB")  # straight to RGB, Pillow warns about each such file
            if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255 instead of scaling
                return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, ValueError, struct.error ...
        reason = "not a picture" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        path = picture if isinstance(picture, str | Path) else name
        raise UserError(f"cannot read the picture {path}: {reason}") from error


def check_headers(samples: Files, faults: Faults) -> None:
    """Open each file without decoding it, and note those that are no picture."""
    for path, _ in samples:
        try:
            with Image.open(path):
                pass
        except Exception:
            try:
                load_rgb(path)
            except UserError as error:
                faults.note(path, str(error))


def class_names(root: Path, train_split: str) -> list[str]:
    """The sorted names of the class folders.

    Raises:
        UserError: no such folder, or fewer than two class folders in it.
    """
    folder = _class_root(root, train_split)
    names = _folder_names(folder)
    if len(names) < 2:
        raise UserError(
            f"{folder} holds {len(names)} class folder(s), at least 2 are needed: {folder}/<class>/<picture>.jpg"
        )
    return names


def scan(root: Path, names: list[str], train_split: str, val_split: str, val_fraction: float) -> tuple[Files, Files]:
    """List the training and validation pictures of the classes `names` below `root`.

    With `root/train_split` and `root/val_split` these are the two sets. A `root` that holds the
    class folders itself is divided: from every class, evenly over its sorted files, a share of
    `val_fraction` (at least one picture) is held out for validation.

    Raises:
        UserError: a missing folder, a class without pictures, classes that differ between the sets.
    """
    if not (root / train_split).is_dir():
        return _hold_out(_pictures(root, names), val_fraction, root)
    val_root = root / val_split
    if not val_root.is_dir():
        raise UserError(f"{val_root} does not exist; validation pictures belong in {val_root}/<class>/")
    val_names = _folder_names(val_root)
    if val_names != names:
        odd = sorted(set(names) ^ set(val_names))
        raise UserError(f"{root / train_split} and {val_root} do not hold the same class folders: {some(odd)}")
    return _pictures(root / train_split, names), _pictures(val_root, names)


def scan_flat(root: Path) -> Files:
    """List every picture below `root`, sorted, under the label -1.

    Raises:
        UserError: no such folder, or no picture in it.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not paths:
        raise UserError(f"no pictures below {root}")
    return Files((str(path), -1) for path in paths)


def scan_further(root: Path, names: list[str]) -> Files:
    """List the pictures of another set of the same classes, as ImageNet-V2.

    The class folders bear the classes' names, or as in ImageNet-V2 their indices, which sorted as
    text would stand in another order: 0, 1, 10, 100, 101, ...

    Raises:
        UserError: no such folder, or other classes than `names`.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    found, indices = set(_folder_names(root)), [str(index) for index in range(len(names))]
    if found == set(names):
        return _pictures(root, names)
    if found == set(indices):
        return _pictures(root, indices)
    raise UserError(
        f"{root} holds {len(found)} class folders, which are neither the model's {len(names)} classes by name "
        f"nor 0 to {len(names) - 1}"
    )


def _folder_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_root(root: Path, train_split: str) -> Path:
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist; name yours with --data.root")
    return root / train_split if (root / train_split).is_dir() else root


def _pictures(folder: Path, names: list[str]) -> Files:
    class Pictures(ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            return names, {name: index for index, name in enumerate(names)}

    samples = Pictures(str(folder), allow_empty=True).samples
    empty = set(names) - {names[label] for _, label in samples}
    if empty:
        raise UserError(f"no pictures in the class folder {some([str(folder / name) for name in sorted(empty)])}")
    return Files(samples)


def _hold_out(samples: Files, fraction: float, root: Path) -> tuple[Files, Files]:
    by_class: dict[int, list[tuple[str, int]]] = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    train: list[tuple[str, int]] = []
    val: list[tuple[str, int]] = []
    for members in by_class.values():
        if len(members) < 2:
            raise UserError(f"{Path(members[0][0]).parent} holds one picture; two are needed to hold one out")
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held = {(2 * i + 1) * len(members) // (2 * count) for i in range(count)}
        for position, sample in enumerate(members):
            (val if position in held else train).append(sample)
    return Files(train), Files(val)


def some(names: list[str], most: int = 3) -> str:
    """The first of the names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

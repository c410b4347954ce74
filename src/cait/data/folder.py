"""Image folders: which folder is which class and which split, and their images."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from cait.data.listing import HEIF, Files, is_image, list_images
from cait.errors import UserError

NEEDS_HEIF = "to read .heic, .venv/bin/pip install pillow-heif"

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test", "testing")
"""Usual names of the two folders of a split; the first that exists is taken."""
MACOS = "__MACOSX"
"""A folder of copies in archives that macOS has made."""


def split_folders(root: Path, train_split: str, val_split: str) -> tuple[Path, Path | None]:
    """The folder of the training classes, and that of the validation classes.

    They are called `train_split` and `val_split`. If "train" is missing, another usual name is taken, in upper or lower
    case; likewise for "val". Without a training folder `root` holds the classes itself, and the second is None. A
    folder "train" without subfolders is a class, of trains, unless validation images lie beside it.

    Raises:
        UserError: there is no folder `root`, or a training folder without its counterpart.
    """
    if root.is_file():
        raise UserError(f"{root} is a file; name the folder that holds the class folders with --data.root")
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist; name yours with --data.root")
    train, val = _named(root, train_split, TRAIN_NAMES), _named(root, val_split, VAL_NAMES)
    if train is None:
        return root, None
    if val is None and train.name == "train" and not folder_names(train) and _has_images(train):
        return root, None
    if val is None:
        raise UserError(f"{root / val_split} does not exist; validation images belong in {root / val_split}/<class>/")
    return train, val


def _named(root: Path, split: str, usual: Sequence[str]) -> Path | None:
    if (root / split).is_dir():
        return root / split
    if split != usual[0]:
        return None
    folders = {name.lower(): name for name in folder_names(root)}
    return next((root / folders[name] for name in usual if name in folders), None)


def _has_images(folder: Path) -> bool:
    return any(is_image(path.name) for path in folder.iterdir())


def class_names(root: Path, train_split: str, val_split: str = "val") -> list[str]:
    """The sorted names of the class folders. Raises UserError if there are fewer than two."""
    folder, _ = split_folders(root, train_split, val_split)
    names = folder_names(folder)
    if len(names) < 2:
        raise UserError(
            f"{folder} holds {len(names)} class folder(s), at least 2 are needed: {folder}/<class>/<image>.jpg"
        )
    return names


def scan(
    root: Path, names: list[str], train_split: str, val_split: str, val_fraction: float, val_list: Path | None = None
) -> tuple[Files, Files]:
    """List the training and validation images of the classes `names` below `root`.

    They lie in two folders, see `split_folders`. A `root` that holds the class folders itself is divided: validation
    takes a share of `val_fraction` (at least one image) from every class, evenly over its sorted files. Or it takes
    the images that the CSV file `val_list` names.

    Raises:
        UserError: a folder is missing, a class has no images, the sets have different classes, or `val_list` does not
            fit the folder.
    """
    train_root, val_root = split_folders(root, train_split, val_split)
    if val_root is None:
        images = list_classes(root, names)
        return _hold_out(images, val_fraction) if val_list is None else _hold_listed(images, root, val_list)
    if val_list is not None:
        raise UserError(f"--data.val_list {val_list}: {root} has validation images of its own in {val_root}")
    val_names = folder_names(val_root)
    if val_names != names:
        odd = sorted(set(names) ^ set(val_names))
        raise UserError(f"{train_root} and {val_root} do not hold the same class folders: {abbreviate(odd)}")
    return list_classes(train_root, names), list_classes(val_root, names)


def _read_val_list(path: Path) -> list[str]:
    """The paths below the data folder in the column `path` of a CSV file, as a run writes it."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            return [row["path"] for row in csv.DictReader(lines) if row["path"]]
    except OSError as error:
        raise UserError(f"--data.val_list {path}: {error.strerror}") from error
    except (KeyError, csv.Error) as error:
        raise UserError(f"--data.val_list {path} has no column `path`") from error


def _hold_listed(images: Files, root: Path, val_list: Path) -> tuple[Files, Files]:
    listed = {os.path.join(root, name) for name in _read_val_list(val_list)}
    held = Files(sample for sample in images if sample[0] in listed)
    if missing := sorted(listed - {path for path, _ in held}):
        problem = f"names images that are not in {root}: {abbreviate(missing)}"
        raise UserError(f"--data.val_list {val_list} {problem}; put them back, or take their lines out of the file")
    train = Files(sample for sample in images if sample[0] not in listed)
    if set(train.labels) != set(images.labels) or not len(held):
        raise UserError(f"--data.val_list {val_list} leaves a class without training images, or nothing held out")
    return train, held


def scan_flat(root: Path) -> Files:
    """List every image below `root`, sorted, with the label -1. Raises UserError if there is none."""
    if not root.is_dir():
        what = "is a file; name the folder that it is in" if root.is_file() else "does not exist"
        raise UserError(f"the folder {root} {what}")
    paths = sorted(path for path in root.rglob("*") if is_image(path.name) and path.is_file())
    if not paths:
        raise UserError(f"no images below {root}")
    return Files((str(path), -1) for path in paths)


def root_name(root: str) -> str:
    """A data set's root in one spelling: `DIR/`, as a shell completes it, is `DIR`."""
    return root.rstrip("/") if "://" in root else str(Path(root))


def folder_names(folder: Path) -> list[str]:
    """The sorted names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:  # it tells folders from files without asking for each
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return [name for name in names if name != MACOS]


def list_classes(folder: Path, names: list[str]) -> Files:
    """List the images of the class folders `names`. Raises UserError if one of them has none."""
    files = list_images(folder, names)
    empty = set(range(len(names))) - set(files.labels)
    if empty:
        folders = abbreviate([str(folder / names[label]) for label in sorted(empty)])
        heif = any(path.suffix.lower() in HEIF for label in empty for path in (folder / names[label]).rglob("*"))
        raise UserError(f"no images in the class folder {folders}{f'; {NEEDS_HEIF}' if heif else ''}")
    return files


def _hold_out(samples: Files, fraction: float) -> tuple[Files, Files]:
    """Training and validation images: of each class, validation takes every so many-th."""
    by_class: dict[int, list[tuple[str, int]]] = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    train: list[tuple[str, int]] = []
    val: list[tuple[str, int]] = []
    for members in by_class.values():
        if len(members) < 2:
            raise UserError(f"{Path(members[0][0]).parent} holds one image; two are needed to hold one out")
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held = {(2 * i + 1) * len(members) // (2 * count) for i in range(count)}
        for position, sample in enumerate(members):
            (val if position in held else train).append(sample)
    return Files(train), Files(val)


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first of the names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

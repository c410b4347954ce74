"""Image folders: which folder is which class and which split, and their images; the settings of both."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy import ndarray

from cait import disk, plugins
from cait.data.listing import (
    BESIDE,
    BROKEN,
    HEIF,
    OTHER,
    Labeled,
    LeftOut,
    composed,
    entries,
    is_image,
    list_images,
)
from cait.data.table import TEST, TRAIN, UNUSED, VAL, Images, evenly_chosen, listed_among
from cait.errors import UserError, abbreviate, printable, tell, tell_once, to_install
from cait.settings import Group, In

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test", "testing")
"""Usual names of the two folders of a split; the first that exists is taken."""


@dataclass(frozen=True)
class Splits(Group):
    """Which images train, and which validate."""

    root: str = "data/imagenet"
    """`root/train/<class>/*` and `root/val/<class>/*`, or `root/<class>/*`, where `val_fraction` of each class is held
    out. At "data/digits" scikit-learn's digits are written first. Or a data set of your own, "package.module:factory":
    the factory is called with split=<train_split or val_split> and returns a map-style data set with `classes`, the
    names of the classes. Its items are pairs of an image (PIL image, path or open file) and a class index, or -1 for an
    image that validation does not count. Every process calls the factory."""
    train_split: str = "train"
    """Name of the training folder in `root`, or of the data set's split; "train+val" joins two."""
    val_split: str = "val"
    """The same for validation. A data set without a validation split, such as CIFAR, has "test": then the best
    checkpoint is chosen on the images that score it, so report the last one."""
    val_fraction: Annotated[float, In("(0, 1)")] = 0.1
    """Share of each class that is held out if `root` has no training folder."""
    val_list: str | None = None
    """CSV file whose column `path` names the images to hold out of such a `root`, such as a run's validation.csv. Then
    `val_fraction` is not used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.root:
            raise UserError("root is empty; name a folder or a data set with --data.root")


class FolderSource:
    """The images of class folders, as `cait.data.source.DataSource`: `images` lists them, `table` divides them.

    `write` writes or unpacks the folders in `prepare`; any number of processes may call it.
    """

    divided_by: tuple[str, ...] = ("val_fraction", "val_list")
    """The settings that say what is held out; a run that goes on has held it out already."""

    def __init__(self, splits: Splits, write: Callable[[], None] | None = None) -> None:
        self.root = Path(splits.root)
        self.splits = splits
        self.write = write
        self.val_list = Path(splits.val_list) if splits.val_list else None
        self.kept: Path | None = None
        """The list of what a run that goes on has held out."""
        self.validates_on_all = False

    def prepare(self) -> None:
        if self.write is not None:
            self.write()

    def split_folders(self) -> tuple[Path, Path | None]:
        """The folder of the training classes, and that of the validation classes.

        They are called `train_split` and `val_split`. If "train" or "val" is missing, another usual name is taken, in
        upper or lower case. Without a training folder the root holds the classes itself, and the second is None. Two
        folders "Train" and "Val" without folders in them are classes if there are others beside them.

        Raises UserError if there is no root, or a training folder without its counterpart.
        """
        root = self.root
        splits = self.splits
        if not root.is_dir():
            problem = "is a file" if root.is_file() else "does not exist"
            raise UserError(f"the data folder {root} {problem}; name yours with --data.root")
        train = _split_folder(root, splits.train_split, TRAIN_NAMES)
        val = _split_folder(root, splits.val_split, VAL_NAMES)
        if train is None and val is not None and class_folders(val):
            raise UserError(
                f"{root} has {val.name}, and no {splits.train_split}; training images belong in "
                f"{root / splits.train_split}/<class>/; if {val.name} is a class add --data.val_split none"
            )
        if train is None:
            return root, None
        others = [root / name for name in class_folders(root) if root / name not in (train, val)]
        if others and not any(class_folders(folder) for folder in (train, val) if folder):
            return root, None
        if val is None:
            missing = root / splits.val_split
            raise UserError(
                f"{missing} does not exist; validation images belong in {missing}/<class>/; "
                f"give --data.root {train} to hold out a part, or if that is a class --data.train_split none"
            )
        return train, val

    def takes(self, folder: Path) -> bool:
        """Whether a folder is a class or lies in one, or would be a split if it were there."""
        splits = {self.splits.train_split, self.splits.val_split, *TRAIN_NAMES, *VAL_NAMES}
        for base in filter(None, {self.root, *self.split_folders()}):
            below_base = os.path.relpath(folder.resolve(), base.resolve())
            name = composed(below_base.partition(os.sep)[0])
            is_new = name == below_base or not (base / name).exists()
            if name in self.class_names or (is_new and name.lower() in splits):
                return True
        return False

    @property
    def without_use(self) -> Sequence[str]:
        """The settings that say nothing of these images."""
        if self.val_list:
            return ["val_fraction"]
        return [] if self.holds_out else self.divided_by

    @property
    def holds_out(self) -> bool:
        """Whether validation takes images from the class folders, because it has no folder of its own."""
        return self.split_folders()[1] is None

    @property
    def keeps_marks(self) -> bool:
        """Whether an image that is marked to validate never trains, also if a list names others."""
        return True

    def validate_on(self, listed: Path | None) -> None:
        """Validate on the images that a file lists, or else on all of class folders, because nothing is trained."""
        self.val_list = listed
        self.validates_on_all = listed is None
        self._divide_anew()

    def keep(self, listed: Path) -> None:
        """Hold out what a run has held out so far, even if its folder has grown since."""
        self.kept = listed
        self._divide_anew()

    def _divide_anew(self) -> None:
        for name in ("table", "train", "val"):
            self.__dict__.pop(name, None)

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted names of the class folders."""
        self.prepare()  # now, because the model's head needs their number before Lightning prepares data
        folder, _ = self.split_folders()
        names = list(class_folders(folder))
        if len(names) < 2:
            raise UserError(
                f"{folder} holds {len(names)} class folder(s), at least 2 are needed: {folder}/<class>/<image>.jpg"
            )
        if odd := [name for name in names if not disk.is_text(name)]:
            raise UserError(
                f"the name of the class folder {folder}/{printable(odd[0])} is not UTF-8: rename it"
            )
        return names

    def classes_of(self, labels: Iterable[int]) -> set[str]:
        """The names of the classes that these labels stand for."""
        return {self.class_names[label] for label in labels}

    @cached_property
    def images(self) -> Images:
        """All images as they lie in one or two folders, those of the training folder first."""
        names = self.class_names
        train, val = self.split_folders()
        if val is None:
            return list_classes([train], names, self.root)
        val_classes = class_folders(val)
        if [*val_classes] != names:
            remedy = "" if val_classes else f"; give --data.root {train} to hold out a part of that"
            raise UserError(
                f"{train} and {val} do not hold the same class folders: "
                f"{abbreviate(sorted({*val_classes} ^ {*names}))}{remedy}"
            )
        for name in val_classes.values():
            if (train / name).exists() and os.path.samefile(train / name, val / name):
                tell(f"{train} and {val} are linked: images that validate are trained on too")
                break
        return list_classes([train, val], names, self.root)

    @cached_property
    def table(self) -> Images:
        """The images with the split of each: the one answer to which of them validate."""
        listed = self.kept or self.val_list
        if not self.holds_out:
            if listed:
                raise UserError(
                    f"{listed} names images to hold out, and {self.root} has validation images in "
                    f"{self.split_folders()[1]}"
                )
            return self.images
        images = self.images
        may_validate = images.splits != TEST
        if self.validates_on_all:
            scored = may_validate if may_validate.any() else ~may_validate
            return images.split_into(np.where(scored, TRAIN | VAL, UNUSED))
        pool = images.select(may_validate)
        validates = listed_among(pool, self.root, listed) if listed else self.choose(pool)
        trains = ~validates
        # an image that is marked to validate, and not in the list, came later
        if listed and self.keeps_marks:
            trains &= pool.splits != VAL
        splits = images.splits.copy()
        splits[may_validate] = np.where(validates, VAL, np.where(trains, TRAIN, UNUSED))
        return self._without_groups(images.split_into(splits))

    def choose(self, pool: Images) -> ndarray:
        """Where the images are [N] that validate, if no list names them."""
        return evenly_chosen(pool, self.splits.val_fraction)

    def _without_groups(self, images: Images) -> Images:
        """The images, where none trains whose group validates, nor what an extra leaves out.

        Raises UserError if no training images are left of a class.
        """
        if images.groups is not None:
            held_out = images.groups[images.splits & (VAL | TEST) > 0]
            same_group = (images.splits == TRAIN) & np.isin(images.groups, held_out)
            images = self.without(images, same_group, "their group validates")
        for leave_out in plugins.of_kind("leave_out"):
            images = leave_out(self, images)
        lacking = {*self.class_names} - self.classes_of(np.unique(images.in_split(TRAIN).labels))
        if lacking:
            raise UserError(
                f"no training images are left of the class {abbreviate(sorted(lacking))}; change what is held out"
            )
        return images

    def without(self, images: Images, left_out: ndarray, reason: str) -> Images:
        """The images, where those of the mask [N] do not train; a line says how many and why."""
        if left_out.any():
            tell_once(
                f"{self.root}: {left_out.sum():,} of {(images.splits == TRAIN).sum():,} training images "
                f"are left out, because {reason}"
            )
        return images.split_into(np.where(left_out, UNUSED, images.splits))

    @cached_property
    def train(self) -> Images:
        return self.table.in_split(TRAIN)

    @cached_property
    def val(self) -> Images:
        return self.table.in_split(VAL)

    @property
    def left_out(self) -> LeftOut:
        """Paths below the root of what was not listed, by the reason."""
        return self.table.left_out


def _split_folder(root: Path, split: str, usual: Sequence[str]) -> Path | None:
    """The folder of a split; under another usual name if the split has the first of these."""
    if (root / split).is_dir():
        return root / split
    if split != usual[0]:
        return None
    folders = {name.lower(): name for name in class_folders(root)}
    return next((root / folders[name] for name in usual if name in folders), None)


def scan_flat(root: Path) -> Images:
    """List every image below `root`, sorted, with the label -1, and say what is left out.

    Raises UserError if it is no folder, cannot be listed, or holds no image.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    left_out: LeftOut = defaultdict(list)
    paths = sorted(Path(path) for path, _ in list_images(root, [""], left_out))
    message = not_listed(_below(left_out, root))
    if not paths:
        raise UserError(f"no images below {root}{message}")
    if left_out:
        tell(f"{root}{message}")
    return Images((str(path), -1) for path in paths)


def not_listed(left_out: LeftOut) -> str:
    """What is not listed in a folder, in words that follow others; empty if all is."""
    reasons = [f"{why} ({len(paths):,}): {abbreviate(paths)}" for why, paths in left_out.items()]
    if any(path.lower().endswith(HEIF) for path in left_out.get(OTHER, [])):
        reasons.append(f"to read .heic, {to_install('pillow-heif')}")
    return f"; left out: {'; '.join(reasons)}" if reasons else ""


def _below(left_out: LeftOut, root: Path) -> LeftOut:
    return {why: [os.path.relpath(path, root) for path in paths] for why, paths in left_out.items()}


def class_folders(folder: Path) -> dict[str, str]:
    """The folders in a folder without hidden ones: the name of a class, and that of its folder, sorted.

    A letter with an accent may be one sign or two; a Mac writes other names than Linux. The class has the first form.
    Raises UserError if the folder cannot be listed, or the names of two folders differ in nothing else.
    """
    folders: dict[str, str] = {}
    for name in entries(folder)[0]:
        if folders.setdefault(composed(name), name) != name:
            raise UserError(
                f"{folder} holds two folders called {name}, whose letters are composed differently"
            )
    return dict(sorted(folders.items()))


def list_classes(folders: Sequence[Path], names: Sequence[str], root: Path) -> Images:
    """List the images of the classes `names`: those of one folder to train on, those of a second to validate.

    What is left out is named below `root`. Raises UserError if a class has no image in one of the folders.
    """
    left_out: LeftOut = defaultdict(list)
    sizes: list[int] = []
    samples = chain.from_iterable(
        _list_classes(folder, names, left_out, sizes) for folder in folders
    )
    prefix = os.path.join(root, "")
    are_below = all(os.path.join(folder, "").startswith(prefix) for folder in folders)
    images = Images(samples, prefix if are_below else "", names)
    images.splits[sizes[0] :] = VAL
    images.left_out = _below(left_out, root)
    return images


def _list_classes(
    folder: Path, names: Sequence[str], left_out: LeftOut, sizes: list[int]
) -> Iterator[Labeled]:
    folders, files = entries(folder)
    name_on_disk = {composed(name): name for name in folders}
    names = [name_on_disk.get(name, name) for name in names]
    counts = [0] * len(names)
    for path, label in list_images(folder, names, left_out):
        counts[label] += 1
        yield path, label
    sizes.append(sum(counts))
    for name in files:
        path = os.path.join(folder, name)
        if is_image(name):
            left_out[BESIDE].append(path)
        elif not os.path.exists(path):
            left_out[BROKEN].append(path)
    if empty := [
        str(folder / name) for name, count in zip(names, counts, strict=True) if not count
    ]:
        raise UserError(
            f"no images in the class folder {abbreviate(empty)}{not_listed(_below(left_out, folder))}"
        )

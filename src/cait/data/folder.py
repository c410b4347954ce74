"""Image folders: which folder is which class and which split, and their images; the settings of both."""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from cait import disk
from cait.data.listing import BESIDE, BROKEN, HEIF, OTHER, Files, entries, is_image, list_images, same_bytes
from cait.errors import UserError, abbreviate, printable, tell, tell_once, to_install
from cait.settings import Group, In

NEEDS_HEIF = f"to read .heic, {to_install('pillow-heif')}"
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test", "testing")
"""Usual names of the two folders of a split; the first that exists is taken."""
COMPARED = 50_000
"""Images that are compared at the start of a run that holds out some: a second or two on a local disk."""


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
    """The images of class folders, as `cait.data.source.DataSource`.

    `write` writes or unpacks the folders in `prepare`; any number of processes may call it.
    """

    divided_by: tuple[str, ...] = ("val_fraction", "val_list")
    """The settings that say what is held out; a run that goes on has held it out already."""

    def __init__(self, splits: Splits, write: Callable[[], None] | None = None) -> None:
        self.root, self.splits, self.write = Path(splits.root), splits, write
        self.left_out: dict[str, list[str]] = {}
        """Paths below the root of what was not listed, by the reason."""
        self.val_list = Path(splits.val_list) if splits.val_list else None
        self.holds_out_all = False

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
        root, splits = self.root, self.splits
        if not root.is_dir():
            what = "is a file" if root.is_file() else "does not exist"
            raise UserError(f"the data folder {root} {what}; name yours with --data.root")
        train, val = _named(root, splits.train_split, TRAIN_NAMES), _named(root, splits.val_split, VAL_NAMES)
        if train is None and val is not None and class_folders(val):
            remedy = f"training images belong in {root / splits.train_split}/<class>/"
            remedy += f"; if {val.name} is a class add --data.val_split none"
            raise UserError(f"{root} has {val.name}, and no {splits.train_split}; {remedy}")
        if train is None:
            return root, None
        others = [root / name for name in class_folders(root) if root / name not in (train, val)]
        if others and not any(class_folders(folder) for folder in (train, val) if folder):
            return root, None
        if val is None:
            place = root / splits.val_split
            remedy = f"give --data.root {train} to hold out a part, or if that is a class --data.train_split none"
            raise UserError(f"{place} does not exist; validation images belong in {place}/<class>/; {remedy}")
        return train, val

    @property
    def groups(self) -> Mapping[str, str]:
        """The group of an image by its path: images of one group are not divided. There are none in class folders."""
        return {}

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

    def validate_on(self, listed: Path | None) -> None:
        """Validate on the images that a file lists, or else on all of class folders, because nothing is trained."""
        self.val_list, self.holds_out_all = listed, listed is None
        self.left_out.clear()
        self.__dict__.pop("sets", None)

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted names of the class folders."""
        self.prepare()  # now, because the model's head needs their number before Lightning prepares data
        folder, _ = self.split_folders()
        names = [*class_folders(folder)]
        if len(names) < 2:
            needed = f"at least 2 are needed: {folder}/<class>/<image>.jpg"
            raise UserError(f"{folder} holds {len(names)} class folder(s), {needed}")
        if odd := [name for name in names if not disk.is_text(name)]:
            raise UserError(f"the name of the class folder {folder}/{printable(odd[0])} is not UTF-8: rename it")
        return names

    def all_images(self) -> Files:
        """The images of the class folders, or of both folders, those to train on first."""
        self.validate_on(None)
        return self.train if self.holds_out else Files([*self.train, *self.val])

    @property
    def train(self) -> Files:
        return self.sets[0]

    @property
    def val(self) -> Files:
        return self.sets[1]

    @cached_property
    def sets(self) -> tuple[Files, Files]:
        """The training and validation images, from their two folders, or of one that is divided."""
        names, val_list, fraction = self.class_names, self.val_list, self.splits.val_fraction
        train, val = self.split_folders()
        if val is None:
            images = self._listed(self.root, names)
            if self.holds_out_all:
                return images, images
            words = {*re.split("[^a-z]+", " ".join(names).lower())}
            if words & {*TRAIN_NAMES} and words & {*VAL_NAMES}:  # as in seg_train and seg_test
                tell(f"{train}: {abbreviate(names)} are taken for classes; see --data.train_split and --data.val_split")
            learned, held = hold_listed(images, self.root, val_list) if val_list else hold_out(images, fraction)
            return self.without_held_out(learned, held), held
        if val_list:
            raise UserError(f"{val_list} names images to hold out, and {self.root} has validation images in {val}")
        of_val = class_folders(val)
        if [*of_val] != names:
            odd = sorted({*of_val} ^ {*names})
            remedy = "" if of_val else f"; give --data.root {train} to hold out a part of that"
            raise UserError(f"{train} and {val} do not hold the same class folders: {abbreviate(odd)}{remedy}")
        if any((train / name).exists() and os.path.samefile(train / name, val / name) for name in of_val.values()):
            tell(f"{train} and {val} are linked: images that validate are trained on too")
        return self._listed(train, names), self._listed(val, names)

    def without_held_out(self, train: Files, held: Files) -> Files:
        """The training images without those that have the group or the bytes of one that is held out.

        Lines say how many those are. Copies stay if a class has no others, and are not looked for among more than
        `COMPARED` images. Raises UserError if no training images are left of a class.
        """
        of, paths = self.groups.get, [path for files in (train, held) for path, _ in files]
        held_groups = {of(path) for path in paths[len(train) :]} - {None}
        of_group = {place for place in range(len(train)) if of(paths[place]) in held_groups}
        copies = set[int]()
        if len(paths) <= COMPARED:
            shared = (same for same in same_bytes(paths.__getitem__, len(paths)) if same[-1] >= len(train))
            copies = {place for same in shared for place in same if place < len(train)} - of_group
        else:
            tell_once(f"{self.root}: the bytes of {len(paths):,} images are not compared; `cait check` does it")
        out = of_group | copies
        others = self.names_of(label for place, label in enumerate(train.labels) if place not in out)
        kept = {place for place in copies if not self.names_of([train.labels[place]]) <= others}
        out -= kept
        learned = Files(sample for place, sample in enumerate(train) if place not in out)
        if lacking := sorted({*self.class_names} - self.names_of(learned.labels)):
            raise UserError(f"no training images are left of the class {abbreviate(lacking)}; change what is held out")
        for places, what in (
            (of_group, "are left out, because their group validates"),
            (copies - kept, "are left out, because a validation image has the same bytes"),
            (kept, "are copies of validation images; their class has no others"),
        ):
            if places:
                tell_once(f"{self.root}: {len(places):,} of {len(train):,} training images {what}")
        return learned

    def names_of(self, labels: Iterable[int]) -> set[str]:
        """The classes of these labels."""
        return {self.class_names[label] for label in {*labels}}

    def _listed(self, folder: Path, names: list[str]) -> Files:
        files = list_classes(folder, names)
        for kind, paths in files.left_out.items():
            self.left_out.setdefault(kind, []).extend(os.path.relpath(folder / path, self.root) for path in paths)
        return files


def list_once(source: Any, of_machine: Callable[[str, Callable[[], Any]], Any]) -> None:
    """List the images of class folders in one process of each machine, by `cait.run.program.Processes.of_machine`."""
    if type(source) is FolderSource:
        source.sets, source.left_out = of_machine(str(source.root), lambda: (source.sets, source.left_out))


def _named(root: Path, split: str, usual: Sequence[str]) -> Path | None:
    if (root / split).is_dir():
        return root / split
    if split != usual[0]:
        return None
    folders = {name.lower(): name for name in class_folders(root)}
    return next((root / folders[name] for name in usual if name in folders), None)


def hold_listed(images: Files, root: Path, val_list: Path) -> tuple[Files, Files]:
    """Training and validation images: validation takes the paths below `root` in the column `path` of a CSV file.

    Raises UserError if the file cannot be read, names no image, or one that is not among `images`.
    """
    rows = disk.read_csv(val_list, str(val_list))
    relative = (os.path.relpath(root / row["path"], root) for _, row in rows if row["path"])
    listed = {composed(os.path.join(root, name)) for name in relative}
    names = [composed(path) for path, _ in images]
    if missing := sorted(listed.difference(names)):
        problem = f"names images that are not in {root}: {abbreviate(missing)}"
        raise UserError(f"{val_list} {problem}; put them back, or take their lines out of the file")
    if not listed:
        raise UserError(f"{val_list} names no images to hold out")
    return taken(images, (place for place, name in enumerate(names) if name in listed))


def taken(samples: Files, places: Iterable[int]) -> tuple[Files, Files]:
    """The images at other places, and those at these."""
    held = {*places}
    rest = (sample for place, sample in enumerate(samples) if place not in held)
    return Files(rest), Files(samples[place] for place in sorted(held))


def scan_flat(root: Path) -> Files:
    """List every image below `root`, sorted, with the label -1, and say what is left out.

    Raises UserError if it is no folder, cannot be listed, or holds no image.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    found = list_images(root, [""])
    paths = sorted(Path(path) for path, _ in found)
    if not paths:
        raise UserError(f"no images below {root}{not_listed(found.left_out)}")
    if found.left_out:
        tell(f"{root}{not_listed(found.left_out)}")
    return Files((str(path), -1) for path in paths)


def not_listed(left_out: Mapping[str, list[str]]) -> str:
    """What is not listed in a folder, in words that follow others; empty if all is."""
    parts = [f"{why} ({len(paths):,}): {abbreviate(paths)}" for why, paths in left_out.items()]
    if any(path.lower().endswith(HEIF) for path in left_out.get(OTHER, [])):
        parts.append(NEEDS_HEIF)
    return f"; left out: {'; '.join(parts)}" if parts else ""


def class_folders(folder: Path) -> dict[str, str]:
    """The folders in a folder without hidden ones: the name of a class, and that of its folder, sorted.

    A letter with an accent may be one sign or two; a Mac writes other names than Linux. The class has the first form.
    Raises UserError if the folder cannot be listed, or the names of two folders differ in nothing else.
    """
    found: dict[str, str] = {}
    for name in entries(folder)[0]:
        if found.setdefault(composed(name), name) != name:
            raise UserError(f"{folder} holds two folders called {name}, whose letters are composed differently")
    return dict(sorted(found.items()))


def composed(name: str) -> str:
    """A name in which each letter with an accent is one sign (NFC)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def spelled(folder: Path, name: str) -> str:
    """The path of a file below a folder, composed as it is there; as it is given if there is no such file."""
    if name.isascii() or (folder / name).exists():
        return name
    found = Path()
    for part in Path(name).parts:
        forms = (unicodedata.normalize(form, part) for form in ("NFC", "NFD"))  # of Linux, and of a Mac
        found /= next((form for form in forms if (folder / found / form).exists()), part)
    return str(found)


def list_classes(folder: Path, names: Sequence[str]) -> Files:
    """List the images of the classes `names`. Raises UserError if one of them has none."""
    folders, others = entries(folder)
    places = {composed(name): name for name in folders}
    files = list_images(folder, [places.get(name, name) for name in names])
    for name in others:
        if is_image(name):
            files.left_out[BESIDE].append(name)
        elif not os.path.exists(folder / name):
            files.left_out[BROKEN].append(name)
    if empty := set(range(len(names))) - set(files.labels):
        lacking = [str(folder / places.get(names[label], names[label])) for label in sorted(empty)]
        raise UserError(f"no images in the class folder {abbreviate(lacking)}{not_listed(files.left_out)}")
    return files


def hold_out(samples: Files, fraction: float) -> tuple[Files, Files]:
    """Training and validation images: validation takes a share of each class, evenly over its sorted files."""
    by_class = defaultdict[int, list[int]](list)
    for place, label in enumerate(samples.labels):
        by_class[label].append(place)
    held = set[int]()
    for places in by_class.values():
        if len(places) < 2:
            raise UserError(f"{samples.name(places[0])} is the only image of its class; two are needed to hold one out")
        count = min(max(1, round(len(places) * fraction)), len(places) - 1)
        middles = [(2 * part + 1) * len(places) // (2 * count) for part in range(count)]  # of so many equal parts
        held |= {places[middle] for middle in middles}
    order = [place for places in by_class.values() for place in places]
    train = Files(samples[place] for place in order if place not in held)
    return train, Files(samples[place] for place in order if place in held)


def tell_of_alike(root: str | Path, names: Sequence[str]) -> None:
    """Say which names of classes differ in letter case, or in signs that nobody sees, alone: one class may be meant."""
    alike = defaultdict[str, list[str]](list)
    for name in names:
        alike["".join(sign for sign in name.casefold() if sign.isprintable() and sign != " ")].append(name)
    if found := [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]:
        tell_once(f"{root}: {abbreviate(found)} differ in letter case or blanks alone, and are classes apart")

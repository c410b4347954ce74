"""The images of a folder, under the labels of a table or of its class folders, divided as the settings say."""

import hashlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cait import disk
from cait.data.folder import TRAIN_NAMES, FolderSource, composed, hold_listed, hold_out, spelled, taken
from cait.data.listing import Files, below
from cait.errors import UserError, abbreviate, tell_once
from cait.extras.annotations import MULTI_LABEL

SPLITS = {
    **dict.fromkeys(TRAIN_NAMES, "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
}
"""What the column `split` may say, in lower case."""
PARTING = ";"
"""Between the labels of an image that has several."""


class Row(NamedTuple):
    path: str
    """Below the root of the images."""
    label: str
    split: str = "train"
    """"train", "val" or "test"; without the column all are to train on."""
    group: str = ""
    """Empty if the file has no such column."""


class AnnotatedSource(FolderSource):
    """The images of a folder, as `cait.data.source.DataSource`.

    What validates is named by `val_list`, as in `cait.data.folder.Splits`, or else by folds or a column.
    """

    divided_by = (*FolderSource.divided_by, "folds", "fold")

    def __init__(self, images: FolderSource, val_list: str | None, asked: Any) -> None:
        super().__init__(images.splits, images.write)
        self.images, self.val_list, self.asked = images, Path(val_list) if val_list else None, asked
        self.left_out = images.left_out

    def split_folders(self) -> tuple[Path, Path | None]:
        """(the folder of the images, None), unless the classes are folders."""
        return super().split_folders() if self.asked.labels is None else (self.root, None)

    @property
    def holds_out(self) -> bool:
        """Whether a file must say later which images validated."""
        return True

    @property
    def without_use(self) -> Sequence[str]:
        if self.val_list:
            used = ["val_list"]
        elif self.asked.folds:
            used = ["folds", "fold"]
        else:
            used = ["val_fraction"] if all(row.split != "val" for row in self.rows) else []
        others = [name for name in self.divided_by if name not in used]
        return others if self.asked.labels is None else [*others, "train_split", "val_split"]

    @property
    def task(self) -> str | None:
        """What the labels are, see `cait.train.metrics.OneClass`."""
        return MULTI_LABEL if self.asked.multi_label else None

    @cached_property
    def rows(self) -> list[Row]:
        """Those of the table, or one for each image of the class folders, ordered by path."""
        if self.asked.labels is None:
            images, names = self.images, self.images.class_names
            parts = {"train": images.all_images()} if images.holds_out else {"train": images.train, "val": images.val}
            of = ((split, *sample) for split, files in parts.items() for sample in files)
            return sorted(Row(below(self.root, path), names[label], split) for split, path, label in of)
        self.prepare()
        if not self.root.is_dir():
            raise UserError(f"the data folder {self.root} does not exist; name yours with --data.root")
        return read_table(Path(self.asked.labels), self.root, self.asked.multi_label)

    @cached_property
    def label_names(self) -> list[str]:
        """The labels by their indices; if an image may have several classes, a label is a set of them."""
        names = sorted({row.label for row in self.rows})
        several = [name for name in names if len(label_parts(name)) > 1]
        if several and not self.asked.multi_label:
            counted = f"{len(several)} labels are parted by {PARTING!r} ({abbreviate(several)}), and each is one class"
            tell_once(f"{self.asked.labels}: {counted}; if an image has several add --data.multi_label true")
        if self.asked.multi_label and not several:
            tell_once(f"{self.asked.labels}: no image has several labels; if one has, part them by {PARTING!r}")
        return names

    @cached_property
    def _sets(self) -> list[list[str]]:
        """The classes of each label."""
        return [label_parts(label) if self.asked.multi_label else [label] for label in self.label_names]

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted labels of the table, or the names of the class folders."""
        names = sorted({name for found in self._sets for name in found})
        if len(names) < 2:
            has = f"the one label {names[0]}" if names else "no label"
            raise UserError(f"--data.labels {self.asked.labels} has {has}, at least 2 are needed")
        return names

    @cached_property
    def label_sets(self) -> Tensor | None:
        """The classes of each label, rows of 0 and 1, if an image may have several."""
        if not self.asked.multi_label:
            return None
        return torch.tensor([[float(name in found) for name in self.class_names] for found in self._sets])

    @cached_property
    def digest(self) -> bytes:
        """Digest of the labels: a run does not go on when one of them has changed."""
        text = "\n".join(f"{row.path}\t{row.label}" for row in self.rows)
        return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

    def _of_split(self, name: str) -> Files:
        places = {label: index for index, label in enumerate(self.label_names)}
        rows = (row for row in self.rows if row.split == name)
        return Files(((row.path, places[row.label]) for row in rows), str(self.root))

    def names_of(self, labels: Iterable[int]) -> set[str]:
        return {name for label in {*labels} for name in self._sets[label]}

    @cached_property
    def groups(self) -> dict[str, str]:
        """By path. Raises UserError if `group_by` finds none for an image."""
        if (regex := self.asked.group_by) is None:
            return {os.path.join(self.root, row.path): row.group for row in self.rows if row.group}
        found = {os.path.join(self.root, row.path): _first_group(regex, row.path) for row in self.rows}
        if without := [path for path, name in found.items() if not name]:
            raise UserError(f"--data.group_by {regex} finds no group in the path of {abbreviate(without)}")
        tell_once(f"{self.root}: {len(found):,} images in {len({*found.values()}):,} groups, by {regex}")
        return found

    @cached_property
    def test(self) -> Files | None:
        """The images of the table's split "test", if it has any."""
        return self._of_split("test") or None

    @cached_property
    def sets(self) -> tuple[Files, Files]:
        """The training and validation images; the test images are in neither."""
        train, val = self._of_split("train"), self._of_split("val")
        pool = Files(sorted([*train, *val]))
        if self.holds_out_all:
            held = pool or self._of_split("test")
            return held, held
        if self.val_list:
            marked = {path for path, _ in val}  # some may have come since the list was written: they never train
            rest, val = hold_listed(pool, self.root, self.val_list)
            train = Files(sample for sample in rest if sample[0] not in marked)
        elif self.asked.folds or (train and not val):
            folds, fold = self.asked.folds, self.asked.fold
            train, val = taken(pool, self._divide(pool, folds)[fold]) if folds else self._hold_out(pool)
            if self.groups:
                self._tell_of_classes(train, val)
        return self.without_held_out(train, Files([*val, *(self.test or ())])), val

    def _hold_out(self, pool: Files) -> tuple[Files, Files]:
        """Hold out `val_fraction`: of groups, or of several classes per image, the fold that serves best.

        What counts first is that no class loses more than half of its images, then that each has some to validate on,
        then the share. A class that the fold leaves out gives a group of its own, if that serves better.
        """
        fraction = self.splits.val_fraction
        if not (self.groups or self.asked.multi_label):
            return hold_out(pool, fraction)

        labels, of = np.array(pool.labels), np.array([self.groups.get(path, path) for path, _ in pool])
        has = np.array([[name in found for name in self.class_names] for found in self._sets])

        def of_classes(some: np.ndarray) -> np.ndarray:
            return np.bincount(some, minlength=len(has)) @ has

        images = of_classes(labels)

        def costs(places: np.ndarray) -> tuple[float, ...]:
            held = of_classes(labels[places])
            lost, lacking = (2 * held > images).sum(), (held == 0).sum()
            return (not len(places), lost, lacking, abs(len(places) / len(pool) - fraction))

        folds = max(2, min(round(1 / fraction), len({*of})))  # scikit-learn takes no more
        held: np.ndarray = min(self._divide(pool, folds), key=costs)
        for index in np.flatnonzero(of_classes(labels[held]) == 0):
            more = (np.union1d(held, np.flatnonzero(of == group)) for group in np.unique(of[has[labels, index]]))
            held = min([held, *more], key=costs)
        return taken(pool, held)

    def _tell_of_classes(self, train: Files, val: Files) -> None:
        """Say how far groups kept a split from its share, and from having every class in validation."""
        wanted = 1 / self.asked.folds if self.asked.folds else self.splits.val_fraction
        share, without = len(val) / (len(train) + len(val)), sorted({*self.class_names} - self.names_of(val.labels))
        if without or abs(share - wanted) > wanted / 2:
            figures = f"{share:.1%} of the images validate, {wanted:.1%} were asked for"
            lacking = f"; no validation images of {len(without)} classes: {abbreviate(without)}" if without else ""
            tell_once(f"{self.asked.labels or self.root}: because groups stay whole, {figures}{lacking}")

    def _divide(self, samples: Files, folds: int) -> list[np.ndarray]:
        """The places of each of scikit-learn's stratified folds, which part no group.

        If an image may have several classes, or if no folds are asked for, the labels of fewer than `folds` images
        count as one.

        Raises UserError if no class, or not the groups, can be divided so.
        """
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        groups = [self.groups[path] for path, _ in samples] if self.groups else None
        if groups and (count := len({*groups})) < folds:
            raise UserError(f"{folds} folds need as many groups, {self.asked.labels or self.root} has {count}")
        labels = np.array(samples.labels)
        if self.asked.multi_label or not self.asked.folds:
            labels = np.where(np.bincount(labels)[labels] < folds, -1, labels)
        kind = StratifiedGroupKFold if groups else StratifiedKFold
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a class of fewer images than folds is in some of them
                return [places for _, places in kind(folds, shuffle=True, random_state=0).split(labels, labels, groups)]
        except ValueError as error:
            raise UserError(f"{len(samples):,} images cannot be divided into {folds} folds: {error}") from error


def read_table(file: Path, root: Path, several: bool) -> list[Row]:
    """The rows of a table, of images below `root`, ordered by path; `several` labels come sorted, parted by `PARTING`.

    Raises UserError if it cannot be read, lacks a column or a cell, names an image twice, or one that is not there.
    """
    where = f"--data.labels {file}"
    rows = sorted(_table_rows(file, where, root, several))
    if not rows:
        raise UserError(f"{where} has no rows")
    times = Counter(row.path for row in rows)
    if twice := [f"{path} ({count} times)" for path, count in times.items() if count > 1]:
        raise UserError(f"{where} names images twice: {abbreviate(twice)}")
    if missing := [row.path for row in rows if not (root / row.path).is_file()]:
        why = "" if all(map(disk.is_text, missing)) else "; save the table as UTF-8, if the names are that"
        raise UserError(f"{where} names {len(missing):,} images that are not in {root}: {abbreviate(missing)}{why}")
    return rows


def _table_rows(file: Path, where: str, root: Path, several: bool) -> Iterator[Row]:
    for line, row in disk.read_csv(file, where):
        name = "label" if "label" in row else "class"  # as in the tables of `cait predict`
        if name not in row:
            raise UserError(f"{where} has no column `label`, it has {', '.join(row)}")
        cells = {column: row[column].strip() for column in {"path", name, "split", "group"} & row.keys()}
        if empty := [column for column, cell in cells.items() if not cell]:
            raise UserError(f"{where}, line {line}: no {abbreviate(sorted(empty))}")
        split = cells.get("split", "train").lower()
        if split not in SPLITS:
            raise UserError(f"{where}, line {line}: split is train, val or test, not {cells['split']!r}")
        label = composed(cells[name])
        if several:
            label = PARTING.join(sorted({*label_parts(label)})) or PARTING
        below = os.path.relpath(root / cells["path"], root)
        yield Row(spelled(root, below), label, SPLITS[split], cells.get("group", ""))


def _first_group(regex: str, path: str) -> str:
    """What the first parentheses that take part in a match hold; empty if nothing matches."""
    found = re.search(regex, path)
    return next(filter(None, found.groups()), "") if found else ""


def label_parts(label: str) -> list[str]:
    """The labels in a cell."""
    return [part.strip() for part in label.split(PARTING) if part.strip()]

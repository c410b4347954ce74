"""The images of a folder, under the labels of a table or of its class folders, divided as the settings say."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from cait import disk
from cait.data.folder import TRAIN_NAMES, FolderSource
from cait.data.listing import below, below_root, composed, spelled
from cait.data.table import TEST, TRAIN, VAL, Images, evenly_chosen, rows_by_class
from cait.errors import UserError, abbreviate, tell_once
from cait.extras.annotations import MULTI_LABEL

SPLITS = {
    **dict.fromkeys(TRAIN_NAMES, TRAIN),
    **dict.fromkeys(("val", "valid", "validation"), VAL),
    "test": TEST,
}
"""What the column `split` may say, in lower case."""
PARTING = ";"
"""Between the labels of an image that has several."""


class Row(NamedTuple):
    path: str
    """Below the root of the images."""
    label: str
    split: int
    group: str
    """Empty if the file has no such column."""
    cell: str
    """The path as the file has it."""


class AnnotatedSource(FolderSource):
    """The images of a folder, as `cait.data.source.DataSource`.

    What validates is named by `val_list`, as in `cait.data.folder.Splits`, or else by folds or a column.
    """

    divided_by = (*FolderSource.divided_by, "folds", "fold")

    def __init__(self, folders: FolderSource, val_list: str | None, asked: Any) -> None:
        super().__init__(folders.splits, folders.write)
        self.folders = folders
        self.val_list = Path(val_list) if val_list else None
        self.asked = asked

    def split_folders(self) -> tuple[Path, Path | None]:
        """(the folder of the images, None), unless the classes are folders."""
        return super().split_folders() if self.asked.labels is None else (self.root, None)

    @property
    def holds_out(self) -> bool:
        """Whether a file must say later which images validated."""
        return True

    @property
    def keeps_marks(self) -> bool:
        """With folds all images train but those of one fold, however they are marked."""
        return self.val_list is not None or not self.asked.folds

    @property
    def without_use(self) -> Sequence[str]:
        if self.val_list:
            used = ["val_list"]
        elif self.asked.folds:
            used = ["folds", "fold"]
        else:
            used = [] if VAL in self.images.splits else ["val_fraction"]
        others = [name for name in self.divided_by if name not in used]
        return others if self.asked.labels is None else [*others, "train_split", "val_split"]

    @property
    def task(self) -> str | None:
        """What the labels are, see `cait.train.metrics.OneClass`."""
        return MULTI_LABEL if self.asked.multi_label else None

    @cached_property
    def images(self) -> Images:
        """The images of the table, or of the class folders, ordered by path.

        Raises UserError if the table cannot be used, or `group_by` finds no group of an image.
        """
        if self.asked.labels is None:
            images = self.folders.images
            images = images.select(np.array(sorted(range(len(images)), key=images.name)))
        else:
            self.prepare()
            if not self.root.is_dir():
                raise UserError(
                    f"the data folder {self.root} does not exist; name yours with --data.root"
                )
            images = read_table(Path(self.asked.labels), self.root, self.asked.multi_label)
        return images if self.asked.group_by is None else self._group_by_name(images)

    def _group_by_name(self, images: Images) -> Images:
        regex = self.asked.group_by
        names = [_first_group(regex, below(self.root, path)) for path, _ in images]
        if without := [images.name(index) for index, name in enumerate(names) if not name]:
            raise UserError(
                f"--data.group_by {regex} finds no group in the path of {abbreviate(without)}"
            )
        images = images.grouped(names)
        tell_once(
            f"{self.root}: {len(images):,} images in {len(images.group_names):,} groups, by {regex}"
        )
        return images

    @cached_property
    def label_names(self) -> list[str]:
        """The labels by their indices; if an image may have several classes, a label is a set of them."""
        names = self.images.label_names
        several = [name for name in names if len(split_label(name)) > 1]
        if several and not self.asked.multi_label:
            tell_once(
                f"{self.asked.labels}: {len(several)} labels are parted by {PARTING!r} ({abbreviate(several)}), "
                "and each is one class; if an image has several add --data.multi_label true"
            )
        if self.asked.multi_label and not several:
            tell_once(
                f"{self.asked.labels}: no image has several labels; if one has, part them by {PARTING!r}"
            )
        return names

    @cached_property
    def _classes_of_label(self) -> list[list[str]]:
        return [
            split_label(label) if self.asked.multi_label else [label] for label in self.label_names
        ]

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted labels of the table, or the names of the class folders."""
        names = sorted({name for classes in self._classes_of_label for name in classes})
        if len(names) < 2:
            has = f"the one label {names[0]}" if names else "no label"
            raise UserError(f"--data.labels {self.asked.labels} has {has}, at least 2 are needed")
        return names

    def classes_of(self, labels: Iterable[int]) -> set[str]:
        return {name for label in labels for name in self._classes_of_label[label]}

    @cached_property
    def _has_class(self) -> ndarray:
        """Whether a label stands for a class, bool [labels, classes]."""
        column_of = {name: column for column, name in enumerate(self.class_names)}
        has_class = np.zeros((len(self.label_names), len(column_of)), bool)
        for label, classes in enumerate(self._classes_of_label):
            has_class[label, [column_of[name] for name in classes]] = True
        return has_class

    @cached_property
    def label_sets(self) -> Tensor | None:
        """The classes of each label, rows of 0 and 1, if an image may have several."""
        return torch.from_numpy(self._has_class).float() if self.asked.multi_label else None

    @cached_property
    def digest(self) -> bytes:
        """Digest of the labels: a run does not go on when one of them has changed."""
        lines = (
            f"{below(self.root, path)}\t{self.label_names[label]}" for path, label in self.images
        )
        return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).digest()

    @cached_property
    def test(self) -> Images | None:
        """The images of the table's split "test", if it has any."""
        return self.images.in_split(TEST) or None

    @cached_property
    def table(self) -> Images:
        """The images with the split of each, by class if a share of each class validates."""
        table = super().table
        pool = np.flatnonzero(table.splits != TEST)
        if self.validates_on_all or self.val_list or not self._takes_share_of_classes(self.images):
            return table
        return table.select(pool[np.concatenate(rows_by_class(np.asarray(table.labels)[pool]))])

    def _takes_share_of_classes(self, images: Images) -> bool:
        return not (
            self.asked.folds
            or self.asked.multi_label
            or images.groups is not None
            or _is_divided(images)
        )

    def choose(self, pool: Images) -> ndarray:
        if not self.asked.folds and _is_divided(pool):
            return pool.splits == VAL
        if self._takes_share_of_classes(pool):
            return evenly_chosen(pool, self.splits.val_fraction)
        validates = np.zeros(len(pool), bool)
        validates[self._chosen_fold(pool)] = True
        if pool.groups is not None:
            self._tell_of_classes(pool, validates)
        return validates

    def _chosen_fold(self, pool: Images) -> ndarray:
        """The rows of the fold that validates. Raises UserError if the images cannot be divided into folds."""
        from cait.extras.annotations.folds import best_fold, folds_of

        name = str(self.asked.labels or self.root)
        if self.asked.folds:
            return folds_of(pool, self.asked.folds, self.asked.multi_label, name)[self.asked.fold]
        return best_fold(pool, self.splits.val_fraction, self._has_class, name)

    def _tell_of_classes(self, pool: Images, validates: ndarray) -> None:
        """Say how far groups kept a split from its share, and from having every class in validation."""
        wanted = 1 / self.asked.folds if self.asked.folds else self.splits.val_fraction
        share = validates.mean()
        without = sorted({*self.class_names} - self.classes_of(pool.select(validates).labels))
        if without or abs(share - wanted) > wanted / 2:
            lacking = (
                f"; no validation images of {len(without)} classes: {abbreviate(without)}"
                if without
                else ""
            )
            tell_once(
                f"{self.asked.labels or self.root}: because groups stay whole, {share:.1%} of the images validate, "
                f"{wanted:.1%} were asked for{lacking}"
            )


def _is_divided(images: Images) -> bool:
    """Whether the table or the folders say what validates, or there is nothing to train on."""
    return VAL in images.splits or TRAIN not in images.splits


def read_table(file: Path, root: Path, several: bool) -> Images:
    """The images that a table lists below `root`, ordered by path; `several` labels come sorted, parted by `PARTING`.

    Raises UserError if it cannot be read, lacks a column or a cell, names an image twice, or one that is not there.
    """
    where = f"--data.labels {file}"
    rows = [*_read_rows(file, where, root, several)]
    if not rows:
        raise UserError(f"{where} has no rows")
    # `cait predict` writes paths from the working directory on
    absent = {*_missing([row.path for row in rows], root)}
    rows = [
        row._replace(path=_from_here(root, row.cell)) if row.path in absent else row for row in rows
    ]
    rows.sort(key=attrgetter("path"))
    times = Counter(row.path for row in rows)
    if twice := [f"{path} ({count} times)" for path, count in times.items() if count > 1]:
        raise UserError(f"{where} names images twice: {abbreviate(twice)}")
    prefix = os.path.join(root, "")
    if missing := _missing([row.path for row in rows], root):
        why = (
            ""
            if all(map(disk.is_text, missing))
            else "; save the table as UTF-8, if the names are that"
        )
        raise UserError(
            f"{where} names {len(missing):,} images that are not in {root}: {abbreviate(missing)}{why}"
        )
    names = sorted({row.label for row in rows})
    index_of = {name: index for index, name in enumerate(names)}
    images = Images(((prefix + row.path, index_of[row.label]) for row in rows), prefix, names)
    images.splits[:] = [row.split for row in rows]
    return images.grouped([row.group for row in rows]) if rows[0].group else images


def _missing(paths: Iterable[str], root: Path) -> list[str]:
    """The paths below `root` where no file is.

    Each folder is listed once, because it takes long in a network to ask for each file.
    """

    @cache
    def files_in(folder: str) -> set[str]:
        with suppress(OSError), os.scandir(root / folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
        return set()

    return [path for path in paths if os.path.basename(path) not in files_in(os.path.dirname(path))]


def _from_here(root: Path, path: str) -> str:
    """The part below `root` of a path from the working directory on; the path itself if no file is there."""
    if not os.path.isfile(path):
        return path
    relative = os.path.relpath(path, root)
    if relative.startswith(os.pardir):  # a link may lead to the root
        folder, name = os.path.split(path)
        folder = os.path.relpath(os.path.realpath(folder), os.path.realpath(root))
        relative = os.path.normpath(os.path.join(folder, name))
    return relative


def _read_rows(file: Path, where: str, root: Path, several: bool) -> Iterator[Row]:
    for line, row in disk.read_csv(file, where):
        name = "label" if "label" in row else "class"  # as in the tables of `cait predict`
        if name not in row:
            raise UserError(f"{where} has no column `label`, it has {', '.join(row)}")
        cells = {
            column: row[column].strip()
            for column in ("path", name, "split", "group")
            if column in row
        }
        is_unread = row.get("error") and not cells[name]  # by `cait predict`
        if is_unread:
            continue
        if empty := [column for column, cell in cells.items() if not cell]:
            raise UserError(f"{where}, line {line}: no {abbreviate(sorted(empty))}")
        split = SPLITS.get(cells.get("split", "train").lower())
        if split is None:
            raise UserError(
                f"{where}, line {line}: split is train, val or test, not {cells['split']!r}"
            )
        label = composed(cells[name])
        if several:
            label = PARTING.join(sorted({*split_label(label)})) or PARTING
        yield Row(
            spelled(root, below_root(root, cells["path"])),
            label,
            split,
            cells.get("group", ""),
            cells["path"],
        )


def _first_group(regex: str, path: str) -> str:
    """What the first parentheses that take part in a match hold; empty if nothing matches."""
    match = re.search(regex, path)
    return next(filter(None, match.groups()), "") if match else ""


def split_label(label: str) -> list[str]:
    """The labels in a cell."""
    return list(filter(None, map(str.strip, label.split(PARTING))))

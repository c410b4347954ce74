"""The images of a folder, under the labels of a table or of its class folders, divided as the settings say."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from cait import disk
from cait.data.folder import TRAIN_NAMES, FolderSource, abbreviate, composed, hold_listed, hold_out, spelled
from cait.data.listing import Files
from cait.errors import UserError
from cait.extras.annotations import MULTI_LABEL

Sample = tuple[str, int]
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

    Args:
        images: the folder.
        val_list: names what validates, as in `cait.data.folder.Splits`; then neither folds nor a column do.
        asked: a `cait.extras.annotations.Annotations`.
    """

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
    def task(self) -> str | None:
        """What the labels are, see `cait.train.metrics.OneClass`."""
        return MULTI_LABEL if self.asked.multi_label else None

    @cached_property
    def rows(self) -> list[Row]:
        """Those of the table, or one for each image of the class folders."""
        if self.asked.labels is None:
            start, names = len(str(self.root)) + 1, self.images.class_names
            pool = sorted([*self.images.train, *self.images.val])
            return [Row(path[start:], names[label]) for path, label in pool]
        self.prepare()
        if not self.root.is_dir():
            raise UserError(f"the data folder {self.root} does not exist; name yours with --data.root")
        return read_table(Path(self.asked.labels), self.root, self.asked.multi_label)

    @cached_property
    def label_names(self) -> list[str]:
        """The labels by their indices; if an image may have several classes, a label is a set of them."""
        return sorted({row.label for row in self.rows})

    @cached_property
    def _sets(self) -> list[list[str]]:
        """The classes of each label."""
        return [label_parts(label) if self.asked.multi_label else [label] for label in self.label_names]

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted labels of the table, or the names of the class folders."""
        names = sorted({name for found in self._sets for name in found})
        if len(names) < 2:
            raise UserError(f"--data.labels {self.asked.labels} has the one label {names[0]}, at least 2 are needed")
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

    def _of_split(self, name: str) -> list[Sample]:
        places = {label: index for index, label in enumerate(self.label_names)}
        return [(str(self.root / row.path), places[row.label]) for row in self.rows if row.split == name]

    @cached_property
    def _groups(self) -> dict[str, str]:
        """The group of each image by its path; empty without groups."""
        return {str(self.root / row.path): row.group for row in self.rows if row.group}

    @cached_property
    def test(self) -> Files | None:
        """The images of the table's split "test", if it has any."""
        return Files(held) if (held := self._of_split("test")) else None

    @cached_property
    def sets(self) -> tuple[Files, Files]:
        """The training and validation images; the test images are in neither."""
        train, val = self._of_split("train"), self._of_split("val")
        pool = sorted([*train, *val])
        if self.holds_out_all:
            held = Files(pool or self._of_split("test"))
            return held, held
        if self.val_list:
            _, listed = hold_listed(Files((path, 0) for path, _ in pool), self.root, self.val_list)
            paths = {path for path, _ in listed}
            train = [sample for sample in pool if sample[0] not in paths]
            val = [sample for sample in pool if sample[0] in paths]
        elif self.asked.folds:
            train, val = self._divide(pool, self.asked.folds, self.asked.fold)
        elif train and not val:
            train, val = self._hold_out(pool)
        if lacking := self._lacking(train):
            names = abbreviate(lacking)
            raise UserError(f"no training images are left of the class {names}: give it some, or change the split")
        return Files(train), Files(val)

    def _hold_out(self, pool: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Hold out about `val_fraction`, and no group in part; the first fold that leaves each class something."""
        if not (self._groups or self.asked.multi_label):
            learned, held_out = hold_out(Files(pool), self.splits.val_fraction)
            return [*learned], [*held_out]
        wanted = max(2, round(1 / self.splits.val_fraction))
        groups = {self._groups.get(path, path) for path, _ in pool}
        largest = len(pool) if self.asked.multi_label else max(Counter(label for _, label in pool).values())
        folds = max(2, min(wanted, len(groups), largest))  # scikit-learn takes no more
        if folds < wanted:
            rank_zero_info(f"{self.asked.labels} has too few groups or images: 1 of {folds} is held out")
        for fold in range(folds):
            train, held = self._divide(pool, folds, fold)
            if held and not self._lacking(train):
                break
        return train, held

    def _lacking(self, train: Sequence[Sample]) -> list[str]:
        learned = {name for label in {label for _, label in train} for name in self._sets[label]}
        return sorted({*self.class_names} - learned)

    def _divide(self, samples: Sequence[Sample], folds: int, fold: int) -> tuple[list[Sample], list[Sample]]:
        """Training and validation images: scikit-learn's stratified fold `fold` of `folds` validates; no group parts.

        If an image may have several classes, the sets of them that fewer than `folds` images have count as one.

        Raises:
            UserError: no class, or not the groups, can be divided so.
        """
        from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

        groups = [self._groups[path] for path, _ in samples] if self._groups else None
        if groups and (count := len({*groups})) < folds:
            raise UserError(f"{count} groups cannot be divided into {folds} folds")
        labels = np.array([label for _, label in samples])
        if self.asked.multi_label:
            labels = np.where(np.bincount(labels)[labels] < folds, -1, labels)
        kind = StratifiedGroupKFold if groups else StratifiedKFold
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a class of fewer images than folds is in some of them
                divided = kind(folds, shuffle=True, random_state=0).split(labels, labels, groups)
                train, held = [*divided][fold]
        except ValueError as error:
            raise UserError(f"{len(samples):,} images cannot be divided into {folds} folds: {error}") from error
        return [samples[index] for index in train], [samples[index] for index in held]


def read_table(file: Path, root: Path, several: bool) -> list[Row]:
    """The rows of a table, of images below `root`, ordered by path.

    Args:
        several: an image may have several labels; they come sorted, parted by `PARTING`.

    Raises:
        UserError: the file cannot be read, lacks a column or a cell, names an image twice, or one that is not there.
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


def label_parts(label: str) -> list[str]:
    """The labels in a cell."""
    return [part.strip() for part in label.split(PARTING) if part.strip()]

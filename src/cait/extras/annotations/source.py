"""The images of a folder, under the labels of a table or of its class folders, divided as the settings say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from cait.data import source
from cait.data.folder import FolderSource, abbreviate, hold_listed, hold_out
from cait.data.listing import Files
from cait.errors import UserError
from cait.extras.annotations import table
from cait.extras.annotations.table import Table

Sample = tuple[str, int]


def open_annotated(root: str, settings: Mapping[str, Any], asked: Any) -> AnnotatedSource:
    """Open what `asked`, a `cait.extras.annotations.Annotations`, makes of the folder `root`.

    Raises:
        UserError: it is no folder of images.
    """
    plain = dict(settings) | {"labels": None, "folds": None, "fold": 0, "val_list": None}
    del plain["root"]
    images = source.open_source(root, **plain)
    if not isinstance(images, FolderSource):
        raise UserError(f"data.labels and data.folds are for folders of images, and {root} is none")
    return AnnotatedSource(images, settings.get("val_list"), asked)


class AnnotatedSource(FolderSource):
    """The images of a folder, as `cait.data.source.DataSource`.

    Args:
        images: the folder.
        val_list: names what validates, as in `cait.data.folder.Splits`; then neither folds nor a column do.
        asked: a `cait.extras.annotations.Annotations`.
    """

    def __init__(self, images: FolderSource, val_list: str | None, asked: Any) -> None:
        super().__init__(images.splits, images.write)
        self.images, self.val_list, self.asked = images, val_list, asked

    def split_folders(self) -> tuple[Path, Path | None]:
        """(the folder of the images, None), unless the classes are folders."""
        return super().split_folders() if self.table is None else (self.root, None)

    @property
    def holds_out(self) -> bool:
        """Whether a file must say later which images validated."""
        return True

    @cached_property
    def table(self) -> Table | None:
        if self.asked.labels is None:
            return None
        self.prepare()
        if not self.root.is_dir():
            raise UserError(f"the data folder {self.root} does not exist; name yours with --data.root")
        return table.read(Path(self.asked.labels), self.root)

    @cached_property
    def class_names(self) -> list[str]:
        """The sorted labels of the table, or the names of the class folders."""
        if self.table is None:
            return self.images.class_names
        names = sorted(set(self.table.labels))
        if len(names) < 2:
            raise UserError(f"--data.labels {self.asked.labels} has the one label {names[0]}, at least 2 are needed")
        return names

    @cached_property
    def digest(self) -> bytes:
        """Digest of the table's labels: a run does not go on when one of them has changed."""
        if self.table is None:
            return b""
        text = "\n".join(map("\t".join, zip(self.table.paths, self.table.labels, strict=True)))
        return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

    @cached_property
    def test(self) -> Files | None:
        """The images of the table's split "test", if it has any."""
        held = self._of_split("test") if self.table is not None else []
        return Files(held) if held else None

    @cached_property
    def sets(self) -> tuple[Files, Files]:
        """The training and validation images."""
        learn, val = self._given()
        pool, groups = sorted([*learn, *val]), self._groups
        if self.val_list:
            return hold_listed(Files(pool), self.root, Path(self.val_list))
        if self.asked.folds:
            train, held = divide(pool, groups, self.asked.folds, self.asked.fold, self.asked.fold_seed)
        elif val:
            train, held = learn, val
            self._warn_of_shared_groups(learn, val)
        elif groups:
            train, held = divide(pool, groups, max(2, round(1 / self.splits.val_fraction)), 0, 0)
        else:
            return hold_out(Files(pool), self.splits.val_fraction)
        if lacking := set(range(len(self.class_names))) - {label for _, label in train}:
            names = abbreviate([self.class_names[label] for label in sorted(lacking)])
            raise UserError(
                f"no training images are left of the class {names}: lower --data.folds, or change the split"
            )
        return Files(train), Files(held)

    def _given(self) -> tuple[list[Sample], list[Sample]]:
        """The images that the table or the folder gives to training and to validation; without the test images."""
        if self.table is None:
            return [*self.images.train], [*self.images.val]
        return self._of_split("train"), self._of_split("val")

    def _of_split(self, name: str) -> list[Sample]:
        """The table's images of a split, with full paths."""
        assert self.table is not None
        places = {label: index for index, label in enumerate(self.class_names)}
        rows = zip(self.table.paths, self.table.labels, self.table.splits, strict=True)
        return [(str(self.root / path), places[label]) for path, label, split in rows if split == name]

    @cached_property
    def _groups(self) -> dict[str, str]:
        """The group of each image by its path; empty without groups."""
        if self.table is None or not self.table.groups:
            return {}
        paths = [str(self.root / path) for path in self.table.paths]
        return dict(zip(paths, self.table.groups, strict=True))

    def _warn_of_shared_groups(self, train: Sequence[Sample], val: Sequence[Sample]) -> None:
        learned, held = ({self._groups[path] for path, _ in side if self._groups} for side in (train, val))
        if shared := sorted(learned & held):
            rank_zero_info(f"{len(shared):,} groups train and validate in {self.asked.labels}: {abbreviate(shared)}")


def divide(
    samples: Sequence[Sample], groups: Mapping[str, str], folds: int, fold: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Training and validation images: scikit-learn's stratified fold `fold` of `folds` validates.

    Args:
        groups: each image's group by its path; no group is divided. Empty without groups.

    Raises:
        UserError: no class, or not the groups, can be divided so.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedGroupKFold if groups else StratifiedKFold
    labels = np.array([label for _, label in samples])
    of_samples = [groups[path] for path, _ in samples] if groups else None
    try:
        train, held = [*kind(folds, shuffle=True, random_state=seed).split(labels, labels, of_samples)][fold]
    except ValueError as error:
        raise UserError(f"{len(samples):,} images cannot be divided into {folds} folds: {error}") from error
    return [samples[index] for index in train], [samples[index] for index in held]

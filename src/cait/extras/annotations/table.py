"""A table of labels: a CSV file with a row for each image."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cait import disk
from cait.data.folder import TRAIN_NAMES, abbreviate, composed, spelled
from cait.errors import UserError

SPLITS = dict.fromkeys(TRAIN_NAMES, "train") | dict.fromkeys(("val", "valid", "validation"), "val") | {"test": "test"}
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


def read(file: Path, root: Path, several: bool) -> list[Row]:
    """The rows of a table, of images below `root`, ordered by path.

    Args:
        several: an image may have several labels; they come sorted, parted by `PARTING`.

    Raises:
        UserError: the file cannot be read, lacks a column or a cell, names an image twice, or one that is not there.
    """
    where = f"--data.labels {file}"
    rows = sorted(_rows(file, where, root, several))
    if not rows:
        raise UserError(f"{where} has no rows")
    times = Counter(row.path for row in rows)
    if twice := [f"{path} ({count} times)" for path, count in times.items() if count > 1]:
        raise UserError(f"{where} names images twice: {abbreviate(twice)}")
    if missing := [row.path for row in rows if not (root / row.path).is_file()]:
        why = "" if all(map(disk.is_text, missing)) else "; save the table as UTF-8, if the names are that"
        raise UserError(f"{where} names {len(missing):,} images that are not in {root}: {abbreviate(missing)}{why}")
    return rows


def _rows(file: Path, where: str, root: Path, several: bool) -> Iterator[Row]:
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
            label = PARTING.join(sorted({*parts(label)})) or PARTING
        path = cells["path"]
        below = os.path.relpath(path, root) if os.path.isabs(path) else os.path.normpath(path)
        yield Row(spelled(root, below), label, SPLITS[split], cells.get("group", ""))


def parts(label: str) -> list[str]:
    """The labels in a cell."""
    return [part.strip() for part in label.split(PARTING) if part.strip()]

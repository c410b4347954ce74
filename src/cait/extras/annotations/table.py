"""A table of labels: a CSV file with a row for each image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cait import disk
from cait.data.folder import TRAIN_NAMES, abbreviate, composed, spelled
from cait.errors import UserError

SPLITS = dict.fromkeys(TRAIN_NAMES, "train") | {"val": "val", "valid": "val", "validation": "val"}
SPLITS |= {"test": "test", "testing": "test"}
"""What the column `split` may say, in lower case."""
PARTING = ";"
"""Between the labels of an image that has several."""


@dataclass
class Table:
    """The rows of a table, ordered by path, in columns of one length; `groups` is empty if the file lacks it."""

    paths: list[str] = field(default_factory=list)
    """Below the root of the images."""
    labels: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """"train", "val" or "test"; without the column all are to train on."""
    groups: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """Of the file."""


def read(file: Path, root: Path, several: bool = False) -> Table:
    """Read a table, of images below `root`; `several` labels of an image come sorted, parted by `PARTING`.

    Raises:
        UserError: the file cannot be read, lacks a column or a cell, names an image twice, or one that is not there.
    """
    where = f"--data.labels {file}"
    rows = sorted(_rows(disk.read_csv(file, where), where, root, several))
    if not rows:
        raise UserError(f"{where} has no rows")
    table = Table(*map(list, zip(*rows, strict=True)))
    places = [f"{path} (line {line})" for path, line in zip(table.paths, table.lines, strict=True)]
    twice = [
        place for path, after, place in zip(table.paths, table.paths[1:], places[1:], strict=False) if path == after
    ]
    if twice:
        raise UserError(f"{where} names images twice: {abbreviate(twice)}")
    if missing := [place for path, place in zip(table.paths, places, strict=True) if not (root / path).is_file()]:
        why = "" if all(map(disk.is_text, missing)) else "; save the table as UTF-8, if the names are that"
        raise UserError(f"{where} names {len(missing):,} images that are not in {root}: {abbreviate(missing)}{why}")
    table.groups = table.groups if any(table.groups) else []
    if several and not any(PARTING in label for label in table.labels):
        example = max(table.labels, key=len)
        raise UserError(f"{where}: no image has several labels, which are parted by {PARTING!r}; one has {example!r}")
    return table


def _rows(
    rows: Iterable[tuple[int, dict[str, str]]], where: str, root: Path, several: bool
) -> Iterator[tuple[str, str, str, str, int]]:
    """(path, label, split, group, line) of each row; without such a column "train", and no group."""
    for line, row in rows:
        label = "label" if "label" in row else "class"  # as in a run's validation.csv
        if label not in row:
            raise UserError(f"{where} has no column `label`, it has {', '.join(row)}")
        cells = {name: row[name].strip() for name in {"path", label, "split", "group"} & row.keys()}
        cells[label] = composed(cells[label])
        if empty := [name for name, cell in cells.items() if not cell]:
            raise UserError(f"{where}, line {line}: no {abbreviate(sorted(empty))}")
        split = cells.get("split", "").lower()
        if split and split not in SPLITS:
            raise UserError(f"{where}, line {line}: split is train, val or test, not {cells['split']!r}")
        named = (PARTING.join(sorted({*parts(cells[label])})) or PARTING) if several else cells[label]
        yield (
            spelled(root, _below(cells["path"], root, where)),
            named,
            SPLITS.get(split, "train"),
            cells.get("group", ""),
            line,
        )


def parts(label: str) -> list[str]:
    """The labels in a cell."""
    return [part.strip() for part in label.split(PARTING) if part.strip()]


def _below(path: str, root: Path, where: str) -> str:
    """A path as it is below `root`."""
    found = os.path.relpath(path, root) if os.path.isabs(path) else os.path.normpath(path)
    if found.split(os.sep)[0] == os.pardir:
        raise UserError(f"{where}: {path} is not below {root}")
    return found

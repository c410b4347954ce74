"""What `--monitor.every_n_steps` has written, read back from a run's monitor.csv."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cait.errors import UserError
from cait.extras.curves import whole_lines
from cait.extras.monitor import FILE

BRANCHES = ("sa", "ffn", "ca", "ca_ffn", "block", "ca_block")
MODULES = "module"
"""Stands for the part if the network is not CaiT: each of its modules is a layer."""


class Table(NamedTuple):
    """One figure over the layers and the steps."""

    layers: list[str]
    """Numbers from 1, or the modules of another network."""
    steps: list[int]
    values: np.ndarray
    """[layers, steps]; NaN where there is none."""


def read(folder: Path) -> dict[tuple[str, str], Table]:
    """The tables of a run by part and name, as ("sa", "branch_ratio"). Rows that are torn are left out.

    Raises:
        UserError: the run was not monitored, or nothing is there yet.
    """
    path = folder / FILE
    lines = whole_lines(path, "only a run with --monitor.every_n_steps N writes it")
    cells: dict[tuple[str, str], dict[tuple[int, str, int], float]] = {}
    for row in csv.reader(lines[1:]):
        try:
            step, number, part, name, value = row
            layer = (int(number), number if part in BRANCHES else part, int(step))
            table = cells.setdefault((part if part in BRANCHES else MODULES, name), {})
            if math.isfinite(float(value)):
                table[layer] = float(value)
        except ValueError:  # torn
            continue
    found = {key: _table(table) for key, table in cells.items() if table}
    if not found:
        raise UserError(f"{path} holds no figures yet")
    return found


def _table(cells: dict[tuple[int, str, int], float]) -> Table:
    layers = sorted({(number, label) for number, label, _ in cells})
    steps = sorted({step for _, _, step in cells})
    rows, columns = ({each: i for i, each in enumerate(those)} for those in (layers, steps))
    values = np.full((len(layers), len(steps)), np.nan)
    for (number, label, step), value in cells.items():
        values[rows[number, label], columns[step]] = value
    return Table([label for _, label in layers], steps, values)

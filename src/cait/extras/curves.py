"""The curves that a run has logged, read back from its metrics.csv, and drawn."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cait import disk
from cait.errors import UserError, one_line
from cait.run import rundir

Curve = tuple[list[int], list[float]]
"""Optimizer steps, and the value at each."""
SPLITS, DASHES = ("train", "val", "val_ema"), ("-", "--", ":", "-.")
FIRST = ("loss", "acc1", "acc5", "lr", "grad_norm")
"""The panels that come first."""
UNITS = {
    "acc1": "top-1 (%)",
    "acc5": "top-5 (%)",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
}


def read(folder: Path) -> dict[str, Curve]:
    """The curves of a run by metric, as "val/acc1", in the order of the steps; "epoch" is one of them.

    Cells that are not finite are left out. A run that has logged nothing, or whose file is damaged, is a UserError.
    """
    found: dict[str, Curve] = {}
    for step, cells in sorted(rows(folder).items()):
        for name, value in cells.items():
            if math.isfinite(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    if not found.keys() - {"epoch"}:
        raise UserError(f"{folder / rundir.METRICS} holds no figures yet")
    return found


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """The cells of metrics.csv that are not empty, by step and metric.

    Raises UserError if the file is missing, or a cell is no number.
    """
    path, found = folder / rundir.METRICS, dict[int, dict[str, float]]()
    for line, row in enumerate(disk.read_rows(path, "the run has logged nothing yet"), 2):
        try:
            step, cells = int(row.pop("step")), {name: float(cell) for name, cell in row.items() if cell}
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}, line {line}, is no row of numbers: {one_line(error)[:100]}") from error
        found.setdefault(step, {}).update(cells)
    return found


def steps_per_epoch(curves: dict[str, Curve]) -> float | None:
    """Optimizer steps of one epoch; None if the run is within its first."""
    steps, epochs = curves.get("epoch", ([], []))
    if not epochs or max(epochs) < 1:
        return None
    return max((step + 1) / (epoch + 1) for step, epoch in zip(steps, epochs, strict=True))


def draw(runs: Mapping[str, dict[str, Curve]]) -> Any:
    """The curves of runs, by the runs' names, as a figure with a panel for each metric; its splits share the panel.

    Colors tell the runs apart and dashes the splits. Time counts in epochs, or in steps if a run is within its first.
    """
    from cait.extras import plots

    metrics = {metric for curves in runs.values() for metric in curves} - {"epoch"}
    titles = sorted({metric.rpartition("/")[2] for metric in metrics})
    titles.sort(key=lambda title: FIRST.index(title) if title in FIRST else len(FIRST))
    units, unit = {label: steps_per_epoch(curves) for label, curves in runs.items()}, "epoch"
    if not all(units.values()):
        units, unit = dict.fromkeys(runs), "step"
    figure, axes = plots.panels(len(titles), 3.6, 2.6, below=0.4)
    for panel, title in zip(axes, titles, strict=True):
        panel.set(title=UNITS.get(title, title), xlabel=unit)
        for number, (label, curves) in enumerate(runs.items()):
            for name in sorted(name for name in curves if name.rpartition("/")[2] == title):
                split = name.rpartition("/")[0] or "train"
                steps, values = curves[name]
                time = [(step + 1) / (units[label] or 1) for step in steps]
                place = SPLITS.index(split) if split in SPLITS else len(SPLITS)
                color = f"C{number if len(runs) > 1 else place}"
                marker = "." if len(values) == 1 else ""
                panel.plot(time, values, DASHES[place], color=color, marker=marker, label=f"{label} {split}")
    keys = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    figure.legend(handles=[*keys.values()], loc="outside lower center", ncols=min(4, 2 * len(titles)), fontsize=8)
    return figure

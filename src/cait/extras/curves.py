"""The curves that a run has logged, read back from its metrics.csv, and drawn."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cait import disk
from cait.errors import UserError, one_line
from cait.run import rundir

Curve = tuple[list[int], list[float]]
"""Optimizer steps, and the value at each."""
Curves = dict[str, Curve]
"""By metric, as "val/acc1"; "epoch" is one of them."""
SPLITS = ("train", "val", "val_ema")
DASHES = ("-", "--", ":", "-.")
FIRST = ("loss", "acc1", "acc5", "lr", "grad_norm")
"""The panels that come first."""
UNITS = {
    "acc1": "top-1 (%)",
    "acc5": "top-5 (%)",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
}


def read(folder: Path) -> Curves:
    """The curves of a run, in the order of the steps.

    Cells that are not finite are left out. A run that has logged nothing, or whose file is damaged, is a UserError.
    """
    curves: Curves = {}
    for step, cells in sorted(rows(folder).items()):
        for name, value in cells.items():
            if math.isfinite(value):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    if not curves.keys() - {"epoch"}:
        raise UserError(f"{folder / rundir.METRICS} holds no figures yet")
    return curves


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """The cells of metrics.csv that are not empty, by step and metric.

    Raises UserError if the file is missing, or a cell is no number.
    """
    path = folder / rundir.METRICS
    cells = defaultdict[int, dict[str, float]](dict)
    for line, row in enumerate(disk.read_rows(path, "the run has logged nothing yet"), 2):
        try:
            step = int(row.pop("step"))
            cells[step] |= {name: float(cell) for name, cell in row.items() if cell}
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}, line {line}, is no row of numbers: {one_line(error)[:100]}"
            ) from error
    return cells


def best(values: Sequence[float], mode: str | None) -> float | None:
    """The best of a metric's values, "max" or "min"; None if there is none, or the mode is not known."""
    if mode is None or not values:
        return None
    return min(values) if mode == "min" else max(values)


def steps_per_epoch(curves: Curves) -> float | None:
    """Optimizer steps of one epoch; None if the run is within its first."""
    steps, epochs = curves.get("epoch", ([], []))
    if not epochs or max(epochs) < 1:
        return None
    return max((step + 1) / (epoch + 1) for step, epoch in zip(steps, epochs, strict=True))


def draw(runs: Mapping[str, Curves]) -> Any:
    """The curves of runs, by the runs' names, as a figure with a panel for each metric; its splits share the panel.

    Colors tell the runs apart and dashes the splits. Time counts in epochs, or in steps if a run is within its first.
    """
    from cait.extras import plots

    metrics = set().union(*runs.values()) - {"epoch"}
    titles = sorted({metric.rpartition("/")[2] for metric in metrics})
    titles.sort(key=lambda title: FIRST.index(title) if title in FIRST else len(FIRST))
    units: dict[str, Any] = {label: steps_per_epoch(curves) for label, curves in runs.items()}
    in_epochs = all(units.values())
    if not in_epochs:
        units = dict.fromkeys(runs, 1)
    figure, axes = plots.panels(len(titles), 3.6, 2.6, below=0.4)
    for panel, title in zip(axes, titles, strict=True):
        panel.set(title=UNITS.get(title, title), xlabel="epoch" if in_epochs else "step")
        for number, (label, curves) in enumerate(runs.items()):
            for name, (steps, values) in sorted(curves.items()):
                split, _, metric = name.rpartition("/")
                if metric != title:
                    continue
                split = split or "train"
                split_number = SPLITS.index(split) if split in SPLITS else len(SPLITS)
                panel.plot(
                    [(step + 1) / units[label] for step in steps],
                    values,
                    DASHES[split_number],
                    color=f"C{number if len(runs) > 1 else split_number}",
                    marker="." if len(values) == 1 else "",
                    label=f"{label} {split}",
                )
    keys = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    figure.legend(
        handles=[*keys.values()],
        loc="outside lower center",
        ncols=min(4, 2 * len(titles)),
        fontsize=8,
    )
    return figure

"""The curves that a run has logged, read back from its metrics.csv, and drawn."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cait import disk
from cait.errors import UserError, one_line
from cait.run import rundir

Curve = tuple[list[int], list[float]]
"""Optimizer steps, and the value at each."""
SPLITS = ("train", "val", "val_ema")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
FIRST = ("loss", "acc1", "acc5", "lr", "grad_norm")
"""The panels that come first."""
UNITS = {"acc1": "top-1 (%)", "acc5": "top-5 (%)", "lr": "learning rate", "grad_norm": "norm of the gradient"}
SMOOTHED_BY = 10
"""A curve of training is averaged over this part of its points."""


def read(folder: Path) -> dict[str, Curve]:
    """The curves of a run by metric, as "val/acc1", in the order of the steps; "epoch" is one of them.

    Cells that are not finite are left out. A run that has logged nothing, or whose file is damaged, is a UserError.
    """
    found: dict[str, Curve] = {}
    for step, cells in sorted(rows(folder).items()):
        for name, cell in cells.items():
            if math.isfinite(value := float(cell)):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    if not found.keys() - {"epoch"}:
        raise UserError(f"{folder / rundir.METRICS} holds no figures yet")
    return found


def rows(folder: Path) -> dict[int, dict[str, str]]:
    """The cells of metrics.csv that are not empty, as they are written, by step and metric.

    Raises:
        UserError: the file is missing, or a cell is no number.
    """
    path, found = folder / rundir.METRICS, dict[int, dict[str, str]]()
    for line, row in enumerate(csv_rows(path, "the run has logged nothing yet"), 2):
        try:
            step, cells = int(row.pop("step")), {name: cell for name, cell in row.items() if cell}
            for cell in cells.values():
                float(cell)
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}, line {line}, is no row of numbers: {one_line(error)[:100]}") from error
        found.setdefault(step, {}).update(cells)
    return found


def csv_rows(path: Path, why: str) -> list[dict[str, str]]:
    """The rows of a table that a run may be writing, without one at the end that is not whole yet.

    Raises:
        UserError: the file is missing, for the reason `why`, or is no table.
    """
    try:
        lines = disk.read_text(path).split("\n")[:-1]
        return list(csv.DictReader(lines, restval=""))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {why}") from error
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {one_line(error)}") from error


def steps_per_epoch(curves: dict[str, Curve]) -> float | None:
    """Optimizer steps of one epoch; None if the run is within its first."""
    steps, epochs = curves.get("epoch", ([], []))
    if not epochs or max(epochs) < 1:
        return None
    return max((step + 1) / (epoch + 1) for step, epoch in zip(steps, epochs, strict=True))


def draw(runs: Mapping[str, dict[str, Curve]]) -> Any:
    """The curves of runs, by the runs' names, as a figure with a panel for each metric; its splits share the panel.

    Colours tell the splits of one run apart. With several runs, colours tell the runs apart and dashes the splits.
    Time counts in epochs, or in steps if a run is within its first epoch. What training logs of single batches is
    drawn as points, with their running mean as the line.
    """
    from matplotlib.lines import Line2D

    from cait.extras import plots

    metrics = {metric for curves in runs.values() for metric in curves} - {"epoch"}
    titles = sorted({metric.rpartition("/")[2] for metric in metrics})
    titles.sort(key=lambda title: FIRST.index(title) if title in FIRST else len(FIRST))
    per_epoch = {label: steps_per_epoch(curves) for label, curves in runs.items()}
    in_epochs = all(per_epoch.values())
    figure, axes = plots.panels(len(titles), 3.6, 2.6, below=0.4)
    splits: dict[str, int] = {}
    for panel, title in zip(axes, titles, strict=True):
        panel.set(title=UNITS.get(title, title), xlabel="epoch" if in_epochs else "step")
        for number, (label, curves) in enumerate(runs.items()):
            for name in sorted(name for name in curves if name.rpartition("/")[2] == title):
                split = name.rpartition("/")[0] or "train"
                place = splits[split] = SPLITS.index(split) if split in SPLITS else len(SPLITS)
                colour, dashes = (f"C{number}", DASHES[place]) if len(runs) > 1 else (f"C{place}", "-")
                steps, values = curves[name]
                unit = per_epoch[label] if in_epochs else None
                time = steps if unit is None else [(step + 1) / unit for step in steps]
                is_of_batches = name.startswith("train/")
                _draw_curve(panel, time, values, is_of_batches, color=colour, linestyle=dashes)
    keys = [Line2D([], [], color=f"C{place}", label=split) for split, place in splits.items()]
    if len(runs) > 1:
        keys = [Line2D([], [], color=f"C{number}", linewidth=4, label=label) for number, label in enumerate(runs)]
        keys += [Line2D([], [], color="0.5", linestyle=DASHES[place], label=split) for split, place in splits.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(6, 3 * len(titles)), fontsize=8)
    return figure


def _draw_curve(panel: Any, time: Sequence[float], values: Any, smooth: bool, **style: Any) -> None:
    """A line; with `smooth` the running mean of its points, which are drawn too."""
    import numpy as np

    window = len(values) // SMOOTHED_BY | 1  # odd, so that as many points count before as after
    if smooth and window > 1:
        panel.plot(time, values, ".", markersize=2.5, alpha=0.4, color=style["color"])
        box = np.ones(window)
        values = np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")
    panel.plot(time, values, linewidth=1.2, marker="." if len(values) == 1 else "", **style)

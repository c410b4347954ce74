"""The curves that a run has logged, read back from its metrics.csv, and drawn."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    found: dict[str, dict[int, float]] = {}
    for step, cells in rows(folder).items():
        for name, cell in cells.items():
            try:
                value = float(cell)
            except ValueError as error:
                path = folder / rundir.METRICS
                raise UserError(f"{path}: {name} at step {step:,} is {cell[:40]!r}, and not a number") from error
            if math.isfinite(value):
                found.setdefault(name, {})[step] = value
    if not found.keys() - {"epoch"}:
        raise UserError(f"{folder / rundir.METRICS} holds no figures yet")
    return {name: (sorted(values), [values[step] for step in sorted(values)]) for name, values in found.items()}


def rows(folder: Path) -> dict[int, dict[str, str]]:
    """The cells of metrics.csv that are not empty, as they are written, by step and metric.

    Raises:
        UserError: the file is missing or damaged.
    """
    path, found = folder / rundir.METRICS, dict[int, dict[str, str]]()
    for line, row in csv_rows(path, "the run has logged nothing yet"):
        step = row.pop("step", "")
        if not (step.isascii() and step.isdecimal()):
            raise UserError(f"{path}, line {line}: step is {step[:40]!r}, and not a whole number")
        found.setdefault(int(step), {}).update({name: cell for name, cell in row.items() if cell})
    return found


def csv_rows(path: Path, why: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line of each row of a run's table that is whole, and its cells by column; see `whole_lines`."""
    reader = csv.DictReader(whole_lines(path, why), restkey="", restval="")
    try:
        for row in reader:
            if "" in row:
                raise UserError(f"{path}, line {reader.line_num}: it has more cells than columns")
            yield reader.line_num, {name: cell[:100] for name, cell in row.items()}
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {one_line(error)}, in line {reader.line_num}") from error


def whole_lines(path: Path, why: str) -> list[str]:
    """The lines of a file that a run may be writing, without the one at the end that is not whole yet.

    Raises:
        UserError: the file is missing, for the reason `why`, or is no text.
    """
    try:
        return disk.read_text(path, within=path.parent).split("\n")[:-1]
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {why}") from error


def steps_per_epoch(curves: dict[str, Curve]) -> float | None:
    """Optimizer steps of one epoch; None if the run is within its first."""
    steps, epochs = curves.get("epoch", ([], []))
    if not epochs or max(epochs) < 1:
        return None
    return max((step + 1) / (epoch + 1) for step, epoch in zip(steps, epochs, strict=True))


def panels(runs: Iterable[dict[str, Curve]]) -> list[str]:
    """What the curves of runs show, a panel each, without the splits: loss, acc1, ..."""
    metrics = sorted({metric for curves in runs for metric in curves} - {"epoch"})
    found = dict.fromkeys(metric.rpartition("/")[2] for metric in metrics)
    return [*(title for title in FIRST if title in found), *(title for title in found if title not in FIRST)]


def smoothed(values: Sequence[float], window: int) -> Any:
    """The mean of the `window` points around each point, of fewer at the ends; `window` is odd."""
    import numpy as np

    box = np.ones(window)
    return np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")


def draw(runs: Mapping[str, dict[str, Curve]], titles: Sequence[str] | None = None) -> Any:
    """The curves of runs, by the runs' names, as a figure with a panel for each metric; its splits share the panel.

    Colours tell the splits of one run apart. With several runs, colours tell the runs apart and dashes the splits.
    Time counts in epochs, or in steps if a run is within its first epoch. What training logs of single batches is
    drawn as points, with their running mean as the line.

    Args:
        titles: those of `panels` to draw; None draws all.
    """
    from matplotlib.lines import Line2D

    from cait.extras import plots

    titles = panels(runs.values()) if titles is None else titles
    per_epoch = {label: steps_per_epoch(curves) for label, curves in runs.items()}
    in_epochs = all(per_epoch.values())
    figure, axes = plots.panels(len(titles), 3.6, 2.6, below=0.4)
    splits: dict[str, int] = {}
    for panel, title in zip(axes, titles, strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            for name in sorted(name for name in curves if name.rpartition("/")[2] == title):
                steps, values = curves[name]
                each = per_epoch[label] if in_epochs else None
                time = [step if each is None else (step + 1) / each for step in steps]
                split = name.rpartition("/")[0] or "train"
                place = SPLITS.index(split) if split in SPLITS else len(SPLITS)
                style: dict[str, Any] = {"color": f"C{number if len(runs) > 1 else place}"}
                window = len(values) // SMOOTHED_BY | 1 if name.startswith("train/") else 1
                if window > 1:
                    panel.plot(time, values, ".", markersize=2.5, alpha=0.4, **style)
                    values, split = smoothed(values, window), f"{split}, smoothed"
                splits[split] = place
                marker, dashes = "." if len(time) == 1 else "", DASHES[place] if len(runs) > 1 else "-"
                panel.plot(time, values, linewidth=1.2, marker=marker, linestyle=dashes, **style)
        panel.set(title=UNITS.get(title, title), xlabel="epoch" if in_epochs else "step")
    if any(split.startswith("train, ") for split in splits):
        splits.pop("train", None)  # the learning rate, which is no measurement
    keys = [Line2D([], [], color=f"C{place}", label=split) for split, place in splits.items()]
    if len(runs) > 1:
        keys = [Line2D([], [], color=f"C{number}", linewidth=4, label=label) for number, label in enumerate(runs)]
        keys += [Line2D([], [], color="0.5", linestyle=DASHES[place], label=split) for split, place in splits.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(6, 3 * len(titles)), fontsize=8)
    return figure

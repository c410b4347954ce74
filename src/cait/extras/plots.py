"""What all figures share: matplotlib without a screen, one style, whole files; and the curves of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cait import disk
from cait.errors import UserError

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
        "image.interpolation": "nearest",
        "figure.dpi": 120,
        # Okabe and Ito's colours, which people with colour-blindness can tell apart.
        "axes.prop_cycle": cycler(
            color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
        ),
    }
)

SPLITS = ("train", "val", "val_ema")
FIRST = ("loss", "acc1", "acc5", "lr", "grad_norm")
"""The panels of the curves that come first."""
DASHES = ("-", "--", ":", "-.")
UNITS = {"acc1": "top-1 (%)", "acc5": "top-5 (%)", "lr": "learning rate", "grad_norm": "norm of the gradient"}
Curves = Mapping[str, tuple[list[int], list[float]]]
"""The optimizer steps and the values of each metric of a run, as `cait.extras.curves.read` gives them."""


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure of width × height inches and its axes [rows, columns]; `options` are those of `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels(count: int, width: float, height: float, below: float = 0.0) -> tuple[Figure, list[Axes]]:
    """A figure and axes of width × height inches each, three in a row, with room `below` for a legend."""
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure, axes = grid(rows, columns, width * columns, height * rows + below)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, list(axes.flat[:count])


def write(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the file's name ends with; the file is whole or as before.

    Raises:
        UserError: matplotlib does not know the format, or the place cannot be written to.
    """
    if path.suffix[1:] not in (formats := figure.canvas.get_supported_filetypes()):
        raise UserError(f"a figure's file ends with one of .{', .'.join(sorted(formats))}; {path} does not")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(path) as beside:
            figure.savefig(beside, format=path.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def draw_curves(runs: Mapping[str, Curves], per_epoch: Mapping[str, float | None]) -> Figure:
    """The curves of runs by the runs' names, a panel for each metric; train, val and val_ema share a panel.

    Colours tell the splits of one run apart. With several runs, colours tell the runs apart and dashes the splits.

    Args:
        per_epoch: optimizer steps of an epoch of each run. If it is None for one of them, the axis counts steps.
    """
    metrics = _by_panel(runs)
    figure, axes = panels(len(metrics), 3.6, 2.6, below=0.4)
    in_epochs = all(per_epoch.values())
    legend: dict[str, Line2D] = {}
    for panel, (title, names) in zip(axes, metrics.items(), strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            each = per_epoch[label] if in_epochs else None
            for name in sorted(curves.keys() & names):
                steps, values = curves[name]
                time = [step if each is None else (step + 1) / each for step in steps]
                split = name.rpartition("/")[0] or "train"
                style = _style(split, number if len(runs) > 1 else None)
                (line,) = panel.plot(time, values, linewidth=1.2, marker="." if len(time) == 1 else "", **style)
                legend[f"{label} {split}" if len(runs) > 1 else split] = line
        panel.set(title=UNITS.get(title, title), xlabel="epoch" if in_epochs else "step")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _by_panel(runs: Mapping[str, Curves]) -> dict[str, list[str]]:
    """The metrics that share a panel, as {"loss": ["train/loss", "val/loss"]}, in the order of the panels."""
    found: dict[str, list[str]] = {}
    for metric in sorted({metric for curves in runs.values() for metric in curves} - {"epoch"}):
        found.setdefault(metric.rpartition("/")[2], []).append(metric)
    first = [title for title in FIRST if title in found]
    return {title: found[title] for title in [*first, *(title for title in found if title not in first)]}


def _style(split: str, number: int | None) -> dict[str, Any]:
    """Colour and dashes of a split of the run `number`; None means the only run."""
    place = SPLITS.index(split) if split in SPLITS else len(SPLITS)
    return {"color": f"C{place}"} if number is None else {"color": f"C{number}", "linestyle": DASHES[place]}

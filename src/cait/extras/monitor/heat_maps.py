"""The measured layers of a run as figures: heat maps layer by epoch, and lines over the depth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cait.extras import curves
from cait.extras.curves import Curve, steps_per_epoch
from cait.extras.monitor import measured
from cait.extras.monitor.measured import MODULES, Table
from cait.extras.plots import grid, panels

Curves = dict[str, Curve]
Tables = dict[tuple[str, str], Table]

PARTS = {
    "sa": "self-attention",
    "ffn": "feed-forward",
    "ca": "class attention",
    "ca_ffn": "its feed-forward",
    "block": "self-attention blocks",
    "ca_block": "class-attention blocks",
    MODULES: "modules",
}
MAPS = {
    "branch_ratio": "branch over residual stream, ‖γ·f(x)‖ / ‖x‖",
    "activation_rms": "root mean square of the residual stream",
    "gamma_median": "median of |γ|",
    "grad_norm": "norm of the parameters' gradient",
    "grad_cosine": "cosine of the gradient with the gradient of the step before",
    "update_cosine": "cosine of the update with the negative gradient",
    "update_ratio": "update over weights, ‖Δw‖ / ‖w‖",
    "input_grad_norm": "norm of the gradient at a block's input",
}
"""Each figure of monitor.csv that has a heat map."""
LINEAR = ("branch_ratio",)
DECADE = 10
ROWS = (("sa", "ffn"), ("ca", "ca_ffn"), ("block",), ("ca_block",), (MODULES,))
"""Parts that stand side by side and share their colours."""


def draw(folder: Path) -> dict[str, Figure]:
    """All figures of a run by name.

    Raises:
        UserError: the run has not measured its layers, or has logged nothing.
    """
    tables, logged = measured.read(folder), curves.read(folder)
    names = [name for name in MAPS if any(name == figure for _, figure in tables)]
    return {name: draw_map(tables, name, logged) for name in names} | {"depth": draw_depth(tables, logged)}


def _time(steps: list[int], per_epoch: float | None) -> list[float]:
    """Epochs that are done after each step, or the steps themselves, which count from 0 as in the files."""
    return [step if per_epoch is None else (step + 1) / per_epoch for step in steps]


def draw_map(tables: Tables, name: str, curves: Curves) -> Figure:
    """The heat map layer × epoch of one figure of `MAPS`: a row of panels for each row of `ROWS` that has it."""
    rows = [[part for part in row if (part, name) in tables] for row in ROWS]
    rows = [row for row in rows if row]
    depths = [max(len(tables[part, name].layers) for part in row) for row in rows]
    heights = [max(1.1, 0.13 * depth + 0.75) for depth in depths]
    columns = max(len(row) for row in rows)
    figure, axes = grid(len(rows), columns, 4.2 * columns + 0.8, sum(heights) + 0.5, height_ratios=heights)
    figure.suptitle(MAPS[name], fontsize=11)
    for line, row in zip(axes, rows, strict=True):
        norm, colours = _colours(name, np.concatenate([tables[part, name].values.ravel() for part in row]))
        for panel in line[len(row) :]:
            panel.set_visible(False)
        for panel, part in zip(line, row, strict=False):
            drawn = _draw_mesh(panel, tables[part, name], steps_per_epoch(curves), norm=norm, cmap=colours)
            panel.set(title=PARTS[part], ylabel="layer" if part != MODULES else "")
        figure.colorbar(drawn, ax=list(line[: len(row)]))
    return figure


def _draw_mesh(panel: Axes, table: Table, per_epoch: float | None, **colours: Any) -> QuadMesh:
    """The table, its layers from the top down, time to the right."""
    borders = _edges(_time(table.steps, per_epoch)), np.arange(len(table.layers) + 1)
    drawn = panel.pcolormesh(*borders, np.ma.masked_invalid(table.values), rasterized=True, **colours)
    _label_layers(panel, table)
    panel.set_xlabel("step" if per_epoch is None else "epoch")
    return drawn


def _colours(name: str, values: np.ndarray) -> tuple[Normalize, str]:
    if name.endswith("cosine"):
        return Normalize(-1, 1), "RdBu"
    positive = values[values > 0]  # NaN is not
    if name in LINEAR or not len(positive):
        return Normalize(0, np.nanmax(values) or 1), "viridis"
    if positive.max() < DECADE * positive.min():  # too narrow for ticks in powers of ten
        return Normalize(positive.min(), positive.max()), "viridis"
    return LogNorm(positive.min(), positive.max()), "viridis"


def _edges(centres: list[float]) -> np.ndarray:
    """The borders of columns around these centres."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    between = (np.array(centres[1:]) + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _label_layers(panel: Axes, table: Table) -> None:
    """The first layer at the top, and names for about a dozen of them."""
    each = math.ceil(len(table.layers) / 12) if table.layers[0].isdigit() else 1
    chosen = range(0, len(table.layers), each)
    panel.set_yticks([i + 0.5 for i in chosen], [table.layers[i] for i in chosen])
    panel.invert_yaxis()


def draw_depth(tables: Tables, curves: Curves, most: int = 5) -> Figure:
    """Gradients and branches against depth: a line for each of `most` measured steps, the first and last among them."""
    wanted = [(part, "grad_norm") for part in ("sa", "ffn", MODULES)]
    wanted += [("block", "input_grad_norm"), ("sa", "branch_ratio"), ("ffn", "branch_ratio")]
    shown = [key for key in wanted if key in tables] or list(tables)[:1]
    figure, axes = panels(len(shown), 3.8, 2.9)
    for panel, (part, name) in zip(axes, shown, strict=True):
        table = tables[part, name]
        _draw_steps(panel, table, steps_per_epoch(curves), most)
        if np.nanmax(table.values) > 0 and name not in LINEAR:
            panel.set_yscale("log")
        panel.set_title(f"{PARTS[part]}:\n{MAPS.get(name, name)}", fontsize=8)
        if part == MODULES:
            panel.set_xticks(range(1, len(table.layers) + 1), table.layers, rotation=90)
        else:
            panel.set_xlabel("layer")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns = 2 * min(3, len(shown))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(most, columns))
    return figure


def _draw_steps(panel: Axes, table: Table, per_epoch: float | None, most: int) -> None:
    chosen = sorted({round(i) for i in np.linspace(0, len(table.steps) - 1, most)})
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(chosen)))  # in the order of time
    for colour, column in zip(colours, chosen, strict=True):
        (time,) = _time([table.steps[column]], per_epoch)
        label = f"step {time}" if per_epoch is None else f"epoch {time:.1f}"
        panel.plot(range(1, len(table.layers) + 1), table.values[:, column], color=colour, marker=".", label=label)

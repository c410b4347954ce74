"""The figures of a run: its curves, and the heat maps of its layers."""

from __future__ import annotations

import math

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cait.analysis.curves import Curve, steps_per_epoch
from cait.analysis.monitored import MODULES, Table
from cait.analysis.plots import grid

Curves = dict[str, Curve]
Tables = dict[tuple[str, str], Table]

SPLITS = ("train", "val", "val_ema")
DASHES = ("-", "--", ":", "-.")
UNITS = {"acc1": "top-1 (%)", "acc5": "top-5 (%)", "lr": "learning rate", "grad_norm": "norm of the gradient"}
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
ROWS = (("sa", "ffn"), ("ca", "ca_ffn"), ("block",), ("ca_block",), (MODULES,))
"""Parts that stand side by side and share their colours."""


def _time(steps: list[int], per_epoch: float | None) -> list[float]:
    """Epochs that are done after each step, or the steps themselves."""
    return [step + 1 if per_epoch is None else (step + 1) / per_epoch for step in steps]


def draw_curves(runs: dict[str, Curves]) -> Figure:
    """The curves of runs by the runs' names, a panel for each metric; train, val and val_ema share a panel.

    The colour tells the splits of one run apart. Of several runs it tells the runs, and the dashes the splits.
    """
    per_epoch = {name: steps_per_epoch(curves) for name, curves in runs.items()}
    in_epochs = all(per_epoch.values())
    panels: dict[str, list[str]] = {}
    for metric in sorted({metric for curves in runs.values() for metric in curves} - {"epoch"}):
        panels.setdefault(metric.rpartition("/")[2], []).append(metric)
    order = ["loss", "acc1", "acc5", "lr", "grad_norm"]
    names = sorted(panels, key=lambda name: (order.index(name) if name in order else len(order), name))
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = grid(rows, columns, 3.6 * columns, 2.6 * rows + 0.4)
    for panel in axes.flat[len(names) :]:
        panel.set_visible(False)
    legend: dict[str, Line2D] = {}
    for panel, name in zip(axes.flat, names, strict=False):
        for number, (label, curves) in enumerate(runs.items()):
            for metric in sorted(curves.keys() & panels[name]):
                split = metric.rpartition("/")[0] or "train"
                place = SPLITS.index(split) if split in SPLITS else len(SPLITS)
                steps, values = curves[metric]
                (legend[f"{label} {split}" if len(runs) > 1 else split],) = panel.plot(
                    _time(steps, per_epoch[label] if in_epochs else None),
                    values,
                    color=f"C{number if len(runs) > 1 else place}",
                    linestyle=DASHES[place] if len(runs) > 1 else "-",
                    linewidth=1.2,
                    marker="." if len(steps) == 1 else "",
                )
        panel.set_title(UNITS.get(name, name))
        panel.set_xlabel("epoch" if in_epochs else "step")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_map(tables: Tables, name: str, curves: Curves) -> Figure:
    """The heat map layer × epoch of one figure of `MAPS`: a row of panels for each row of `ROWS` that has it."""
    there = [[part for part in row if (part, name) in tables] for row in ROWS]
    there = [row for row in there if row]
    depths = [max(len(tables[part, name].layers) for part in row) for row in there]
    heights = [max(1.1, 0.13 * depth + 0.75) for depth in depths]
    columns = max(len(row) for row in there)
    figure, axes = grid(len(there), columns, 4.2 * columns + 0.8, sum(heights) + 0.5, height_ratios=heights)
    per_epoch = steps_per_epoch(curves)
    figure.suptitle(MAPS[name], fontsize=11)
    for line, row in zip(axes, there, strict=True):
        norm, colours = _colours(name, np.concatenate([tables[part, name].values.ravel() for part in row]))
        for panel in line[len(row) :]:
            panel.set_visible(False)
        for panel, part in zip(line, row, strict=False):
            table = tables[part, name]
            drawn = panel.pcolormesh(
                _edges(_time(table.steps, per_epoch)),
                np.arange(len(table.layers) + 1),
                np.ma.masked_invalid(table.values),
                norm=norm,
                cmap=colours,
                rasterized=True,
            )
            _label_layers(panel, table)
            panel.set_title(PARTS[part])
            panel.set_ylabel("layer" if part != MODULES else "")
            panel.set_xlabel("step" if per_epoch is None else "epoch")
        figure.colorbar(drawn, ax=list(line[: len(row)]))
    return figure


def _colours(name: str, values: np.ndarray) -> tuple[Normalize, str]:
    if name.endswith("cosine"):
        return Normalize(-1, 1), "RdBu"
    positive = values[values > 0]  # NaN is not
    if name in LINEAR or not len(positive) or positive.min() == positive.max():
        return Normalize(0, np.nanmax(values) or 1), "viridis"
    return LogNorm(positive.min(), positive.max()), "viridis"


def _edges(centres: list[float]) -> np.ndarray:
    """The borders of columns around these centres."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    between = (np.array(centres[1:]) + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _label_layers(panel: Axes, table: Table) -> None:
    """The first layer at the top, and names for about a dozen of them."""
    each = 1 if table.layers[0].isdigit() is False else math.ceil(len(table.layers) / 12)
    chosen = range(0, len(table.layers), each)
    panel.set_yticks([i + 0.5 for i in chosen], [table.layers[i] for i in chosen])
    panel.invert_yaxis()


def draw_depth(tables: Tables, curves: Curves, most: int = 5) -> Figure:
    """Gradients and branches against depth: a line for each of `most` measured steps, the first and last among them."""
    wanted = [(part, "grad_norm") for part in ("sa", "ffn", MODULES)]
    wanted += [("block", "input_grad_norm"), ("sa", "branch_ratio"), ("ffn", "branch_ratio")]
    panels = [key for key in wanted if key in tables]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = grid(rows, columns, 3.8 * columns, 2.9 * rows)
    per_epoch = steps_per_epoch(curves)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (part, name) in zip(axes.flat, panels, strict=False):
        table = tables[part, name]
        chosen = sorted({round(i) for i in np.linspace(0, len(table.steps) - 1, most)})
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(chosen)))  # in the order of time
        for colour, column in zip(colours, chosen, strict=True):
            time = _time([table.steps[column]], per_epoch)[0]
            label = f"step {time:.0f}" if per_epoch is None else f"epoch {time:.1f}"
            panel.plot(range(1, len(table.layers) + 1), table.values[:, column], color=colour, marker=".", label=label)
        if np.nanmax(table.values) > 0 and name not in LINEAR:
            panel.set_yscale("log")
        panel.set_title(f"{PARTS[part]}:\n{MAPS[name]}", fontsize=8)
        if part == MODULES:
            panel.set_xticks(range(1, len(table.layers) + 1), table.layers, rotation=90)
        else:
            panel.set_xlabel("layer")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(most, 2 * columns))
    return figure

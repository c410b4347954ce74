"""The measured layers of a run as figures: heat maps layer by epoch."""

import contextlib
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy import ndarray

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError
from cait.extras import curves
from cait.extras.plots import panels, write
from cait.run import rundir
from cait.run.program import Program
from contrib.monitor import FILE

MODULES = "(modules)"
"""Stands for the part if the network is not CaiT: each of its modules is a layer."""
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
    "update_cosine": "cosine of the update with the negative gradient",
    "update_ratio": "update over weights, ‖Δw‖ / ‖w‖",
    "input_grad_norm": "norm of the gradient at a block's input",
}
"""Each figure of monitor.csv that has a heat map."""


class Table(NamedTuple):
    """One figure over the layers and the steps."""

    layers: list[str]
    """Numbers from 1, or the modules of another network."""
    steps: list[int]
    values: ndarray
    """[layers, steps]; NaN where there is none."""


Cells = dict[tuple[int, int, str], float]
"""A figure's values by step, number of the layer and name of the layer."""
Tables = dict[tuple[str, str], Table]
"""By part and name, as ("sa", "branch_ratio")."""


def heat_maps(arguments: list[str], program: Program) -> None:
    """Draw the heat maps of a run into its folder."""
    options = Options("heat-maps", "Draw the layers that a run has measured.")
    options.add_argument("run", metavar="NAME", help="the run's folder in logs/")
    folder = rundir.folder_of(options.parse_args(arguments).run)
    for name, figure in draw(folder).items():
        path = folder / "heat_maps" / f"{name}.png"
        write(figure, path)
        print(path)


def draw(folder: Path) -> dict[str, Figure]:
    """All figures of a run by name; a UserError if it has not measured its layers, or has logged nothing."""
    tables = read(folder)
    per_epoch = curves.steps_per_epoch(curves.read(folder))
    measured = {name for _, name in tables}
    return {name: draw_map(tables, name, per_epoch) for name in MAPS if name in measured}


def read(folder: Path) -> Tables:
    """The tables of a run's monitor.csv; a UserError if it was not monitored, or nothing is there yet."""
    path = folder / FILE
    figures = defaultdict[tuple[str, str], Cells](dict)
    for row in disk.read_rows(path, "only a run with the callback Monitor writes it"):
        # a crash of the machine has garbled the row
        with contextlib.suppress(ValueError, KeyError):
            part, label = row["part"], row["layer"]
            if part not in PARTS:
                part, label = MODULES, part
            step = int(row["step"])
            figures[part, row["name"]][step, int(row["layer"]), label] = float(row["value"])
    if not figures:
        raise UserError(f"{path} holds no figures yet")
    return {key: _table(cells) for key, cells in figures.items()}


def _table(cells: Cells) -> Table:
    layers = sorted({(layer, label) for _, layer, label in cells})
    steps = sorted({step for step, *_ in cells})
    return Table(
        [label for _, label in layers],
        steps,
        np.array([[cells.get((step, *layer), math.nan) for step in steps] for layer in layers]),
    )


def draw_map(tables: Tables, name: str, per_epoch: float | None) -> Figure:
    """The heat map layer × epoch of one figure of `MAPS`, a panel for each part that has it; the first layer on top.

    `per_epoch` are the optimizer steps of an epoch, to show the epochs that are done; None shows the steps.
    """
    shown = {part: tables[part, name] for part in PARTS if (part, name) in tables}
    height = max(2.6, 0.13 * max(len(table.layers) for table in shown.values()) + 0.75)
    figure, axes = panels(len(shown), 4.6, height, in_a_row=2)
    figure.suptitle(MAPS[name], fontsize=11)
    for panel, (part, table) in zip(axes, shown.items(), strict=True):
        times = np.array(table.steps)
        if per_epoch:
            times = (times + 1) / per_epoch
        layers = np.arange(len(table.layers))
        norm, colors = _colors(name, table.values)
        mesh = panel.pcolormesh(
            _edges(times),
            _edges(layers + 0.5),
            table.values,
            rasterized=True,
            norm=norm,
            cmap=colors,
        )
        figure.colorbar(mesh, ax=panel)
        # names for about a dozen layers
        every = 1 if part == MODULES else math.ceil(len(layers) / 12)
        panel.set_yticks(layers[::every] + 0.5, table.layers[::every])
        panel.invert_yaxis()
        panel.set(title=PARTS[part], xlabel="epoch" if per_epoch else "step")
        panel.set_ylabel("" if part == MODULES else "layer")
    return figure


def _colors(name: str, values: ndarray) -> tuple[Normalize, str]:
    if name.endswith("cosine"):
        return Normalize(-1, 1), "RdBu"
    positive = values[values > 0]  # NaN is not
    if name == "branch_ratio" or not len(positive):
        return Normalize(0, np.nanmax(values) or 1), "viridis"
    if positive.max() < 10 * positive.min():  # too narrow for ticks in powers of ten
        return Normalize(positive.min(), positive.max()), "viridis"
    return LogNorm(positive.min(), positive.max()), "viridis"


def _edges(centers: ndarray) -> ndarray:
    """The borders of columns around these centers."""
    if len(centers) == 1:
        return centers[0] + np.array([-0.5, 0.5])
    halves = np.diff(centers) / 2
    return np.concatenate(
        [centers[:1] - halves[:1], centers[:-1] + halves, centers[-1:] + halves[-1:]]
    )

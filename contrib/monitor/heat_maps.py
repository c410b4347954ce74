"""The measured layers of a run as figures: heat maps layer by epoch."""

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

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
    values: np.ndarray
    """[layers, steps]; NaN where there is none."""


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
    tables, per_epoch = read(folder), curves.steps_per_epoch(curves.read(folder))
    names = [name for name in MAPS if any(name == figure for _, figure in tables)]
    return {name: draw_map(tables, name, per_epoch) for name in names}


def read(folder: Path) -> Tables:
    """The tables of a run's monitor.csv; a UserError if it was not monitored, or nothing is there yet."""
    path = folder / FILE
    found: dict[tuple[str, str], dict[tuple[int, str], dict[int, float]]] = {}
    for row in disk.read_rows(path, "only a run with the callback Monitor writes it"):
        with contextlib.suppress(ValueError, KeyError):  # a crash of the machine has garbled the row
            part, layer = row["part"], row["layer"]
            kind, label = (part, layer) if part in PARTS else (MODULES, part)
            number, step, value = int(layer), int(row["step"]), float(row["value"])
            found.setdefault((kind, row["name"]), {}).setdefault((number, label), {})[step] = value
    if not found:
        raise UserError(f"{path} holds no figures yet")
    return {key: _table(rows) for key, rows in found.items()}


def _table(rows: dict[tuple[int, str], dict[int, float]]) -> Table:
    layers, steps = sorted(rows), sorted({step for values in rows.values() for step in values})
    values = np.array([[rows[layer].get(step, math.nan) for step in steps] for layer in layers])
    return Table([label for _, label in layers], steps, values)


def draw_map(tables: Tables, name: str, per_epoch: float | None) -> Figure:
    """The heat map layer × epoch of one figure of `MAPS`, a panel for each part that has it; the first layer on top.

    `per_epoch` are the optimizer steps of an epoch, to show the epochs that are done; None shows the steps.
    """
    shown = {part: tables[part, name] for part in PARTS if (part, name) in tables}
    height = max(2.6, 0.13 * max(len(table.layers) for table in shown.values()) + 0.75)
    figure, axes = panels(len(shown), 4.6, height, in_a_row=2)
    figure.suptitle(MAPS[name], fontsize=11)
    for panel, (part, table) in zip(axes, shown.items(), strict=True):
        times = [step if per_epoch is None else (step + 1) / per_epoch for step in table.steps]
        norm, colors = _colours(name, table.values)
        borders = _edges(times), np.arange(len(table.layers) + 1)
        drawn = panel.pcolormesh(*borders, table.values, rasterized=True, norm=norm, cmap=colors)
        figure.colorbar(drawn, ax=panel)
        each = math.ceil(len(table.layers) / 12) if part != MODULES else 1  # names for about a dozen of them
        panel.set_yticks(np.arange(len(table.layers))[::each] + 0.5, table.layers[::each])
        panel.invert_yaxis()
        panel.set(title=PARTS[part], xlabel="step" if per_epoch is None else "epoch")
        panel.set_ylabel("layer" if part != MODULES else "")
    return figure


def _colours(name: str, values: np.ndarray) -> tuple[Normalize, str]:
    if name.endswith("cosine"):
        return Normalize(-1, 1), "RdBu"
    positive = values[values > 0]  # NaN is not
    if name == "branch_ratio" or not len(positive):
        return Normalize(0, np.nanmax(values) or 1), "viridis"
    if positive.max() < 10 * positive.min():  # too narrow for ticks in powers of ten
        return Normalize(positive.min(), positive.max()), "viridis"
    return LogNorm(positive.min(), positive.max()), "viridis"


def _edges(centers: list[float]) -> np.ndarray:
    """The borders of columns around these centers."""
    halves = np.diff(centers) / 2 if len(centers) > 1 else np.array([0.5])
    return np.concatenate([[centers[0] - halves[0]], centers[:-1] + halves, [centers[-1] + halves[-1]]])

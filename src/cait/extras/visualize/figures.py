"""The curves of runs as a figure."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cait.plots import panels
from cait.run.curves import Curve, steps_per_epoch

Curves = dict[str, Curve]

SPLITS = ("train", "val", "val_ema")
FIRST = ("loss", "acc1", "acc5", "lr", "grad_norm")
"""The panels that come first."""
DASHES = ("-", "--", ":", "-.")
UNITS = {"acc1": "top-1 (%)", "acc5": "top-5 (%)", "lr": "learning rate", "grad_norm": "norm of the gradient"}


def _time(steps: list[int], per_epoch: float | None) -> list[float]:
    """Epochs that are done after each step, or the steps themselves, which count from 0 as in the files."""
    return [step if per_epoch is None else (step + 1) / per_epoch for step in steps]


def draw_curves(runs: dict[str, Curves]) -> Figure:
    """The curves of runs by the runs' names, a panel for each metric; train, val and val_ema share a panel.

    Colours tell the splits of one run apart. With several runs, colours tell the runs apart and dashes the splits.
    """
    metrics = _by_panel(runs)
    figure, axes = panels(len(metrics), 3.6, 2.6, below=0.4)
    per_epoch = {label: steps_per_epoch(curves) for label, curves in runs.items()}
    in_epochs = all(per_epoch.values())
    legend: dict[str, Line2D] = {}
    for panel, (title, names) in zip(axes, metrics.items(), strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            for name in sorted(curves.keys() & names):
                time = _time(curves[name][0], per_epoch[label] if in_epochs else None)
                split = name.rpartition("/")[0] or "train"
                style = _style(split, number if len(runs) > 1 else None)
                marker = "." if len(time) == 1 else ""
                (line,) = panel.plot(time, curves[name][1], linewidth=1.2, marker=marker, **style)
                legend[f"{label} {split}" if len(runs) > 1 else split] = line
        panel.set(title=UNITS.get(title, title), xlabel="epoch" if in_epochs else "step")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _by_panel(runs: dict[str, Curves]) -> dict[str, list[str]]:
    """The metrics that share a panel, as {"loss": ["train/loss", "val/loss"]}, in the order of the panels."""
    by_panel: dict[str, list[str]] = {}
    for metric in sorted({metric for curves in runs.values() for metric in curves} - {"epoch"}):
        by_panel.setdefault(metric.rpartition("/")[2], []).append(metric)
    first = [title for title in FIRST if title in by_panel]
    return {title: by_panel[title] for title in [*first, *(title for title in by_panel if title not in first)]}


def _style(split: str, number: int | None) -> dict[str, Any]:
    """Colour and dashes of a split of the run `number`; None means the only run."""
    place = SPLITS.index(split) if split in SPLITS else len(SPLITS)
    return {"color": f"C{place}"} if number is None else {"color": f"C{number}", "linestyle": DASHES[place]}

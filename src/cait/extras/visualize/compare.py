"""`cait compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cait.cli.options import Options
from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program

TRAINING = ("train/acc1", "train/loss")


def compare(arguments: list[str], program: Program) -> None:
    """Print the settings and the metrics in which runs differ, and draw their curves over each other."""
    options = Options("compare", "Show what differs between runs: settings, metrics, curves.")
    options.add_argument("runs", metavar="NAME", nargs="*", help="two or more folders in logs/")
    options.add_argument("--output", type=Path, metavar="FILE", help="default logs/compare-NAME-NAME.png")
    given = options.parse_args(arguments)
    folders = [rundir.find(name) for name in given.runs]
    if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise UserError('compare two runs or more: `make compare RUNS="a b"` or `cait compare a b`, each named once')
    from cait import plots
    from cait.extras.visualize import comparison, figures
    from cait.run import curves

    all_settings = [comparison.settings(folder) for folder in folders]
    logged = [curves.read(folder) for folder in folders]
    labels = _labels(folders)
    output = given.output or folders[0].parent / f"compare-{'-'.join(folder.resolve().name for folder in folders)}.png"
    plots.write(figures.draw_curves(dict(zip(labels, logged, strict=True))), output)
    _print(labels, comparison.differing(all_settings), _metrics(logged))
    print(os.path.relpath(output))


def _labels(folders: list[Path]) -> list[str]:
    """The names of the folders, or their paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]  # "." has a name too
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _metrics(logged: list[Any]) -> dict[str, list[str]]:
    """Steps, epochs, and the best and the last value of each metric, by run."""
    from cait.extras.visualize.comparison import reached
    from cait.run.curves import steps_per_epoch

    done = [max(max(steps) for steps, _ in curves.values()) + 1 for curves in logged]
    per_epoch = [steps_per_epoch(curves) for curves in logged]
    rows = {
        "steps": [str(step) for step in done],
        "epochs": [f"{step / each:.4g}" if each else "≤ 1" for step, each in zip(done, per_epoch, strict=True)],
    }
    metrics = {name for curves in logged for name in curves}
    for name in sorted(name for name in metrics if name in TRAINING or name.startswith("val")):
        found = [reached(curves[name], name) if name in curves else None for curves in logged]
        if name not in TRAINING:
            rows[f"{name}, best (step)"] = [f"{one.best:.4g} ({one.best_step})" if one else "-" for one in found]
        rows[f"{name}, last"] = [f"{one.last:.4g}" if one else "-" for one in found]
    return rows


def _print(labels: list[str], settings: dict[str, list[str]], metrics: dict[str, list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A table that is piped into a file keeps its columns.
    plain: Any = {"markup": False, "highlight": False}  # values have brackets
    console = Console(**plain) if sys.stdout.isatty() else Console(width=80, **plain)
    if not settings:
        console.print("The settings are the same.")
    for title, rows in (("setting", settings), ("metric", metrics)):
        if rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for label in (title, *labels):
                table.add_column(label, overflow="fold", no_wrap=label == title)
            for name, values in rows.items():
                table.add_row(name, *values)
            console.print(table)

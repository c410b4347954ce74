"""`cait compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cait import run
from cait.errors import UserError
from cait.verbs.options import Options


def compare(arguments: list[str], *others: Any) -> None:
    """Print the settings and the metrics in which runs differ, and draw their curves over each other."""
    options = Options("compare", "Show what differs between runs: settings, metrics, curves.")
    options.add_argument("runs", metavar="NAME", nargs="*", help="two or more folders in logs/")
    options.add_argument("--output", type=Path, metavar="FILE", help="default logs/compare-NAME-NAME.png")
    given = options.parse_args(arguments)
    folders = [run.find(name) for name in given.runs]
    if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise UserError('compare two runs or more: `make compare RUNS="a b"` or `cait compare a b`, each named once')
    from cait.analysis import comparison, curves, figures, plots

    all_settings = [comparison.settings(folder) for folder in folders]
    logged = [curves.read(folder) for folder in folders]
    labels = _labels(folders)
    _print(labels, comparison.differing(all_settings), _metrics(logged))
    output = given.output or folders[0].parent / f"compare-{'-'.join(folder.name for folder in folders)}.png"
    if not output.suffix:
        raise UserError(f"--output {output} needs an ending, such as .png or .pdf")
    plots.write(figures.draw_curves(dict(zip(labels, logged, strict=True))), output)
    print(os.path.relpath(output))


def _labels(folders: list[Path]) -> list[str]:
    """The names of the folders, or their paths where two have the same name."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _metrics(logged: list[Any]) -> dict[str, list[str]]:
    """Steps, epochs, and the best and the last of each metric of training and validation, by run."""
    from cait.analysis.comparison import reached

    rows = {
        "steps": [str(max(max(steps) for steps, _ in curves.values()) + 1) for curves in logged],
        "epochs": [f"{curves['epoch'][1][-1] + 1:.0f}" if "epoch" in curves else "-" for curves in logged],
    }
    for name in sorted({name for curves in logged for name in curves if name.partition("/")[0] in SPLITS}):
        found = [reached(curves[name], name) if name in curves else None for curves in logged]
        if name.startswith("val"):
            rows[f"{name}, best"] = [f"{one.best:.4g} at step {one.best_step}" if one else "-" for one in found]
        rows[f"{name}, last"] = [f"{one.last:.4g}" if one else "-" for one in found]
    return rows


SPLITS = ("train", "val", "val_ema")


def _print(labels: list[str], settings: dict[str, list[str]], metrics: dict[str, list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A table that is piped into a file keeps its columns.
    console = Console() if sys.stdout.isatty() else Console(width=80)
    if not settings:
        console.print("The settings are the same.")
    for title, rows in (("setting", settings), ("metric", metrics)):
        if rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for label in (title, *labels):
                table.add_column(label, overflow="fold")
            for name, values in rows.items():
                table.add_row(name, *values)
            console.print(table)

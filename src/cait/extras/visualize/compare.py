"""`cait compare`: the settings and the metrics in which runs differ, and their curves over each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cait.cli.options import Options
from cait.errors import UserError, one_line
from cait.extras.curves import Curve, steps_per_epoch
from cait.guards.configurations import check_config
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, as_text, flatten

NOT_SETTINGS = ("run_name", "output", "ckpt_path", "trainer.default_root_dir")
"""A run's own name and places."""
TRAINING = ("train/acc1", "train/loss")


class Reached(NamedTuple):
    """One metric of one run."""

    best: float
    last: float
    best_step: int


def compare(arguments: list[str], program: Program) -> None:
    """Print the settings and the metrics in which runs differ, and draw their curves over each other."""
    options = Options("compare", "Show what differs between runs: settings, metrics, curves.")
    options.add_argument("runs", metavar="NAME", nargs="*", help="two or more folders in logs/")
    options.add_argument("--output", type=Path, metavar="FILE", help="default logs/compare-NAME-NAME.png")
    given = options.parse_args(arguments)
    folders = [rundir.folder_of(name) for name in given.runs]
    if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise UserError('compare two runs or more: `make compare RUNS="a b"` or `cait compare a b`, each named once')
    from cait.extras import curves, plots

    all_settings = [settings(folder) for folder in folders]
    logged = [curves.read(folder) for folder in folders]
    labels = _labels(folders)
    output = given.output or folders[0].parent / f"compare-{'-'.join(folder.resolve().name for folder in folders)}.png"
    plots.write(curves.draw(dict(zip(labels, logged, strict=True))), output)
    _print(labels, differing(all_settings), _metrics(logged))
    print(os.path.relpath(output))


def settings(folder: Path) -> Settings:
    """The run's config.yaml as {"model.lr": 0.001, ...}.

    Raises:
        UserError: there is none, or it is no configuration.
    """
    path = rundir.config(folder)
    check_config(path)
    try:
        nested = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:  # a tag, which nothing here reads
        raise UserError(f"{path} is not a configuration: {one_line(error)}") from error
    return {name: value for name, value in flatten(nested).items() if name not in NOT_SETTINGS}


def differing(all_settings: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with the value of each run; "-" where a run does not have it."""
    names = sorted({name for settings in all_settings for name in settings})
    values = {
        name: [as_text(settings[name]) if name in settings else "-" for settings in all_settings] for name in names
    }
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def reached(curve: Curve, name: str) -> Reached:
    """The best and the last value of a curve; the best of a loss is its smallest, of anything else its largest."""
    steps, values = curve
    best = (min if "loss" in name else max)(values)
    return Reached(best, values[-1], steps[values.index(best)])


def _labels(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]  # "." has a name too
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _metrics(logged: Sequence[dict[str, Curve]]) -> dict[str, list[str]]:
    """Steps, epochs, and the best and the last value of each metric, by run."""
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


def _print(labels: Sequence[str], settings: Mapping[str, list[str]], metrics: Mapping[str, list[str]]) -> None:
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

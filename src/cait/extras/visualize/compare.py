"""`cait compare`: the settings and the metrics in which runs differ, and their curves over each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cait import disk
from cait.cli import saved
from cait.cli.options import Options
from cait.errors import UserError, console, one_line, printable, to_type
from cait.extras import curves
from cait.extras.curves import Curve
from cait.extras.network_name import network_name
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, as_text, flatten

NOT_SETTINGS = ("run_name", "output", "ckpt_path", "trainer.default_root_dir")
"""A run's own name and places."""
TRAINING = ("train/acc1", "train/loss")


def compare(arguments: list[str], program: Program) -> None:
    """Print the settings and the metrics in which runs differ, and draw their curves over each other."""
    options = Options("compare", "Show what differs between runs: settings, metrics, curves.")
    options.add_argument("runs", metavar="NAME", nargs="*", help="two or more folders in logs/")
    options.add_argument("--output", type=Path, metavar="FILE", help="default logs/compare-NAME-NAME.png")
    given = options.parse_args(arguments)
    command = to_type('make compare RUNS="a b"', "cait compare a b")
    folders = [*_readable(given.runs)]
    if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise UserError(f"compare two runs or more, each named once: `{command}`")
    from cait.extras import plots

    names = [folder.resolve().name for folder in folders]  # "." has a name too
    output = given.output or folders[0].parent / f"compare-{'-'.join(names)}.png"
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    disk.check_output(output)
    all_settings = [settings(folder) for folder in folders]
    models = [saved.of_run(folder)["model"] for folder in folders]
    networks = [network_name(model["name"], model.get("fields")) for model in models]
    logged = [curves.read(folder) for folder in folders]
    plots.write(curves.draw(dict(zip(labels, logged, strict=True))), output)
    _print(labels, {"setting": differing(all_settings), "metric": {"network": networks} | _metrics(logged)})
    print(os.path.relpath(output))


def _readable(names: Sequence[str]) -> Iterator[Path]:
    """The folders of those runs that can be read; a line says what is wrong with another, if two others are left."""
    damaged, found = list[UserError](), list[Path]()
    for name in names:
        try:
            folder = rundir.folder_of(name)
            saved.of_run(folder), curves.read(folder)
            found.append(folder)
        except UserError as error:
            damaged.append(error)
    if damaged and len(found) < 2:
        raise damaged[0]
    for each in damaged:
        print(f"left out: {printable(one_line(each))}", file=sys.stderr)
    return iter(found)


def settings(folder: Path) -> Settings:
    """The run's config.yaml as {"model.lr": 0.001, ...}, without its own name and places."""
    found = flatten(saved.of_run(folder))
    return {name: value for name, value in found.items() if name not in NOT_SETTINGS}


def differing(all_settings: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with the value of each run; "-" where a run does not have it."""
    found = {}
    for name in sorted({name for settings in all_settings for name in settings}):
        values = [as_text(settings[name]) if name in settings else "-" for settings in all_settings]
        if len(set(values)) > 1:
            found[name] = values
    return found


def reached(curve: Curve, name: str) -> tuple[float, float, int]:
    """(best value, last value, step of the best): the best loss is the smallest, of anything else the largest."""
    steps, values = curve
    best = (min if "loss" in name else max)(values)
    return best, values[-1], steps[values.index(best)]


def _metrics(logged: Sequence[dict[str, Curve]]) -> dict[str, list[str]]:
    """Steps, epochs, and the best and the last value of each metric, by run."""
    rows: dict[str, list[str]] = {"steps": [], "epochs": []}
    for of_run in logged:
        done, per_epoch = max(max(steps) for steps, _ in of_run.values()) + 1, curves.steps_per_epoch(of_run)
        rows["steps"].append(str(done))
        rows["epochs"].append(f"{done / per_epoch:.4g}" if per_epoch else "≤ 1")
    metrics = {name for of_run in logged for name in of_run}
    for name in sorted(name for name in metrics if name in TRAINING or name.startswith("val")):
        found = [reached(of_run[name], name) if name in of_run else None for of_run in logged]
        if name not in TRAINING:
            rows[f"{name}, best (step)"] = [f"{one[0]:.4g} ({one[2]})" if one else "-" for one in found]
        rows[f"{name}, last"] = [f"{one[1]:.4g}" if one else "-" for one in found]
    return rows


def _print(labels: Sequence[str], tables: Mapping[str, dict[str, list[str]]]) -> None:
    from rich import box
    from rich.table import Table

    # A table that is piped into a file keeps its columns. Values have brackets, which are no markup.
    screen = console(width=None if sys.stdout.isatty() else 80, highlight=False)
    if not tables["setting"]:
        screen.print("The settings are the same.")
    for title, rows in tables.items():
        if rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for label in (title, *labels):
                table.add_column(label, overflow="fold", no_wrap=label == title)
            for name, values in rows.items():
                table.add_row(name, *values)
            screen.print(table)

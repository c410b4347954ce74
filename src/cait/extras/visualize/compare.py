"""`cait compare`: the settings and the metrics in which runs differ, and their curves; of one run the curves."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cait.cli import saved
from cait.cli.options import Options
from cait.errors import table_console
from cait.extras import curves
from cait.extras.curves import Curve, Curves
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, as_text, flatten

NOT_SETTINGS = ("run_name", "output", "ckpt_path", "weights_only", "trainer.default_root_dir")
"""A run's own name and places."""


def compare(arguments: list[str], program: Program) -> None:
    """Print the settings and the metrics in which runs differ, and draw their curves over each other."""
    options = Options(
        "compare",
        "Show what differs between runs: settings, metrics, curves; of one run its curves.",
    )
    options.add_argument("runs", metavar="NAME", nargs="+", help="folders in logs/")
    options.add_argument(
        "--output", type=Path, metavar="FILE", help="default logs/compare-NAME-NAME.png"
    )
    args = options.parse_args(arguments)
    folders = {name: rundir.folder_of(name) for name in args.runs}
    settings = [flatten(saved.run_settings(folder)) for folder in folders.values()]
    logged = {name: curves.read(folder) for name, folder in folders.items()}
    if len(folders) > 1:
        _print("setting", folders, differing(settings))
        _print("metric", folders, _metrics([*logged.values()]))
    from cait.extras import plots

    first, *others = folders.values()
    output = args.output or first.parent / picture([folder.name for folder in (first, *others)])
    plots.write(curves.draw(logged), output)
    print(os.path.relpath(output))


def picture(names: Sequence[str]) -> str:
    """The file for the curves of runs of these names; it may have 255 bytes."""
    name = f"compare-{'-'.join(names)}.png"
    return (
        name
        if len(os.fsencode(name)) <= 255
        else f"compare-{names[0]:.50}-and-{len(names) - 1}-more.png"
    )


def differing(all_settings: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with the value of each run; "-" where a run does not have it."""
    rows = {}
    for name in sorted(set().union(*all_settings).difference(NOT_SETTINGS)):
        values = [as_text(settings[name]) if name in settings else "-" for settings in all_settings]
        if len(set(values)) > 1:
            rows[name] = values
    return rows


def best(curve: Curve, name: str) -> str:
    """The best value and its step, by the metric's name; "-" if that does not say what is best."""
    from cait.train.metrics import best_mode

    steps, values = curve
    value = curves.best(values, best_mode(name, {}))
    return "-" if value is None else f"{value:.4g} ({steps[values.index(value)]})"


def _metrics(logged: Sequence[Curves]) -> dict[str, list[str]]:
    """The steps, and the best and the last value of each metric, by run."""
    rows = {"steps": [str(1 + max(steps[-1] for steps, _ in run.values())) for run in logged]}
    for name in sorted(set().union(*logged)):
        if name.startswith("val"):
            rows[f"{name}, best (step)"] = [
                best(run[name], name) if name in run else "-" for run in logged
            ]
        if name.startswith(("val", "train/")):
            rows[f"{name}, last"] = [
                f"{run[name][1][-1]:.4g}" if name in run else "-" for run in logged
            ]
    return rows


def _print(title: str, names: Iterable[str], rows: Mapping[str, list[str]]) -> None:
    from rich import box
    from rich.table import Table

    screen = table_console(80, highlight=False)
    if not rows:
        screen.print(f"The {title}s are the same.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in (title, *names):
        table.add_column(label, overflow="fold", no_wrap=label == title)
    for name, values in rows.items():
        table.add_row(name, *values)
    screen.print(table)

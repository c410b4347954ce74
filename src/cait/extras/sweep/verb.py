"""`cait sweep`: its options, its table, and what is shown at the end."""

from __future__ import annotations

import math
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, console, to_install, to_type
from cait.extras.runner import Runner
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.extras.sweep.search_space import SearchSpace

DESCRIPTION = """\
Train the trials of a space of settings and show which are best. What is done is not trained
again, and what was interrupted is resumed: give the same command again. Give it in a second
terminal too, or on a second GPU, and both share the work."""
STATES = ("complete", "pruned", "running", "waiting", "fail")
"""Optuna's, in the order of the table."""


def sweep(arguments: list[str], program: Program) -> None:
    """Train the missing trials of a sweep and write its table."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("space", metavar="SPACE.yaml", type=Path, help="what to search, a file")
    options.add_argument("--show", action="store_true", help="only show the table of what is done so far")
    given = options.parse_args(arguments)
    try:
        import_module("optuna")
    except ImportError as error:
        raise UserError(f"a sweep needs Optuna: {to_install('[sweep]')}") from error
    from cait.extras.sweep.search_space import SearchSpace
    from cait.extras.sweep.trials import Sweep

    search = SearchSpace(given.space)
    folder = rundir.LOGS / search.name
    disk.check_inside(folder)
    if (folder / rundir.CONFIG).exists():
        raise UserError(f"{folder} is a run; give {given.space} another `name:`")
    if not given.show:
        runner = Runner(program, "trials")
        with runner.threads(1) as pool:  # it stops them and says so
            pool.submit(Sweep(search, folder, runner).train).result()
    rows = read_rows(folder, search)
    _show(rows, search)
    if rows and not given.show:
        disk.write_csv(folder / "trials.csv", list(rows[0]), [list(row.values()) for row in rows])
        print(os.path.relpath(folder / "trials.csv"))
        if rows[0]["state"] == "complete":
            _say_what_next(rows[0]["run"], search, program)
    if rows and all(row["state"] == "fail" for row in rows):
        raise UserError(f"all {len(rows)} trials have failed; the first: {rows[0]['cause']}")


def read_rows(folder: Path, search: SearchSpace) -> list[dict[str, Any]]:
    """The trials by the columns of trials.csv, best first; then those stopped early, running and failed."""
    from cait.extras.sweep import trials

    best = max if search.mode == "max" else min
    rows: list[dict[str, Any]] = [
        {
            "trial": place,
            "state": trial.state.name.lower(),
            search.metric: best(trial.intermediate_values.values(), default=None),
            "validations": len(trial.intermediate_values),
            **{name: trial.params.get(name) for name in search.axes},
            "run": trials.trial_folder(folder, place),
            "cause": trial.user_attrs.get(trials.CAUSE, ""),
        }
        for place, trial in trials.last_tries(trials.load(folder, search)).items()
        if place < search.trials
    ]
    sign = -1 if search.mode == "max" else 1

    def order(row: dict[str, Any]) -> tuple[int, float]:
        value = row[search.metric]
        return STATES.index(row["state"]), math.inf if value is None else sign * value

    return sorted(rows, key=order)


def _show(rows: list[dict[str, Any]], search: SearchSpace) -> None:
    """Print the table, and below it why trials have failed."""
    from rich import box
    from rich.table import Table

    from cait.extras.sweep.trials import short

    screen = console(highlight=False)
    columns = ["trial", "state", search.metric, "validations", *search.axes]
    table = Table(*(name.rpartition(".")[2] for name in columns), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*("-" if row[name] is None else short(row[name]) for name in columns))
    screen.print(table)
    for row in rows:
        if row["cause"]:
            screen.print(f"trial {row['trial']} failed: {row['cause']}")


def _say_what_next(best: Path, search: SearchSpace, program: Program) -> None:
    name, options = f"{search.name}-best", f"--trainer.default_root_dir {rundir.LOGS} --trainer.max_epochs N"
    train = to_type(
        f'make train CONFIG={best / rundir.CONFIG} RUN={name} ARGS="{options}"',
        f"cait fit --config {best / rundir.CONFIG} --run_name {name} {options}",
    )
    print(f"\nThe best is {best}. Train it longer, from the start:\n  {train}")
    print(f"Score it:\n  {program.command('eval', best)}")

"""`cait sweep`: its options, the check of a space, and what is shown at the end."""

from __future__ import annotations

import contextlib
import io
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, to_install, to_type
from cait.extras.runner import Runner
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.extras.sweep.search_space import SearchSpace

DESCRIPTION = """\
Train the trials of a space of settings and show which are best. What is done is not trained
again, and what was interrupted is resumed: give the same command again. Give it in a second
terminal too, or on a second GPU, and both share the work."""


def sweep(arguments: list[str], program: Program) -> None:
    """Train the missing trials of a sweep and write its table."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("space", metavar="SPACE.yaml", type=Path, help="what to search, a file")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at a time, each on its own GPU")
    options.add_argument("--show", action="store_true", help="only show the table of what is done so far")
    given = options.parse_args(arguments)
    if given.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {given.jobs}")
    try:
        import_module("optuna")
    except ImportError as error:
        raise UserError(f"a sweep needs Optuna: {to_install('[sweep]')}") from error
    from cait.extras.sweep import studies, table
    from cait.extras.sweep.search_space import SearchSpace
    from cait.extras.sweep.workers import Workers

    search = SearchSpace(given.space)
    folder = rundir.LOGS / search.name
    disk.check_inside(folder)
    if (folder / rundir.CONFIG).exists():
        raise UserError(f"{folder} is a run; give {given.space} another `name:`")
    if not given.show:
        if not studies.has_begun(folder):
            check_values(search, program)
        Workers(search, folder, given.jobs, Runner(program, "trials")).train()
    rows = table.read_rows(studies.load(folder), search, folder)
    table.show(rows, search)
    if rows and not given.show:
        disk.write_csv(folder / "trials.csv", list(rows[0]), [list(row.values()) for row in rows])
        print(os.path.relpath(folder / "trials.csv"))
        if rows[0]["state"] == "complete":
            _say_what_next(rows[0]["run"], search, program)
    if rows and all(row["state"] == "fail" for row in rows):
        raise UserError(f"all {len(rows)} trials have failed; the first: {rows[0]['cause']}")


def check_values(search: SearchSpace, program: Program) -> None:
    """Have `fit` parse each value once, before a sweep begins.

    Raises:
        UserError: `fit` refuses one.
    """
    from cait.cli.lightning import CaiTCLI

    for name, value, arguments in search.probes():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                CaiTCLI(["fit", *arguments, "--print_config"], program)
        except UserError as error:
            raise UserError(f"{search.path}: with {name}: {value}: {error}") from error


def _say_what_next(best: Path, search: SearchSpace, program: Program) -> None:
    config, name, options = best / rundir.CONFIG, f"{search.name}-best", f"--trainer.default_root_dir {rundir.LOGS}"
    train = to_type(
        f'make train CONFIG={config} RUN={name} \\\n    ARGS="{options} --trainer.max_epochs N"',
        f"cait fit --config {config} --run_name {name} \\\n    {options} --trainer.max_epochs N",
    )
    print(f"\nThe best is {best}. Train it longer, from the start:\n  {train}")
    print(f"Score it:\n  {program.command('eval', best)}")

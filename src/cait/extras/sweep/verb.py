"""`cait sweep`: its options, and what is shown at the end."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, to_install, to_type
from cait.extras.runner import Runner
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from cait.extras.sweep.search_space import SearchSpace

DESCRIPTION = """\
Train the trials of a space of settings and show which are best. What is done is not trained
again, and what was interrupted is resumed: give the same command again. Give it in a second
terminal too, or on a second GPU, and both share the work."""


def sweep(arguments: list[str], program: Program) -> None:
    """Train the missing trials of a sweep and list all."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("space", metavar="SPACE.yaml", type=Path, help="what to search, a file")
    options.add_argument("--show", action="store_true", help="only list what is done so far")
    given = options.parse_args(arguments)
    try:
        import_module("optuna")
    except ImportError as error:
        raise UserError(f"a sweep needs Optuna: {to_install('[sweep]')}") from error
    from cait.extras.sweep import trials
    from cait.extras.sweep.search_space import SearchSpace

    search = SearchSpace(given.space)
    folder = rundir.LOGS / search.name
    disk.check_inside(folder)
    if (folder / rundir.CONFIG).exists():
        raise UserError(f"{folder} is a run; give {given.space} another `name:`")
    if not given.show:
        runner = Runner(program, "trials")
        with runner.threads(1) as pool:  # it stops them and says so
            pool.submit(trials.Sweep(search, folder, runner).train).result()
    ranked = rank(trials.last_tries(trials.load(folder, search)), search)
    for place, trial in ranked:
        print(trials.trial_folder(folder, place).name, _in_words(trial, search), sep="  ")
    if ranked and ranked[0][1].state.name == "COMPLETE":
        _say_what_next(trials.trial_folder(folder, ranked[0][0]), search, program)
    if ranked and all(trial.state.name == "FAIL" for _, trial in ranked):
        raise UserError(f"all {len(ranked)} trials of {folder} have failed")


def rank(tries: dict[int, FrozenTrial], search: SearchSpace) -> list[tuple[int, FrozenTrial]]:
    """The trials by their place, those that came to their end first, and the better ones first among them."""
    sign = -1 if search.mode == "max" else 1

    def order(item: tuple[int, FrozenTrial]) -> tuple[bool, float]:
        value = _value(item[1], search)
        return item[1].state.name != "COMPLETE", math.inf if value is None else sign * value

    return sorted((item for item in tries.items() if item[0] < search.trials), key=order)


def _value(trial: FrozenTrial, search: SearchSpace) -> Any:
    """The best value of a trial so far; None if it has none."""
    best = max if search.mode == "max" else min
    return best(trial.intermediate_values.values(), default=None)


def _in_words(trial: FrozenTrial, search: SearchSpace) -> str:
    from cait.extras.sweep import trials

    value = _value(trial, search)
    shown = f"{search.metric} {'-' if value is None else trials.short(value)}"
    settings = [f"{name}={trials.short(value)}" for name, value in trial.params.items()]
    cause = trial.user_attrs.get(trials.CAUSE)
    return "  ".join([f"{trial.state.name.lower():8}", shown, *settings, *([cause] if cause else [])])


def _say_what_next(best: Path, search: SearchSpace, program: Program) -> None:
    name, options = f"{search.name}-best", f"--trainer.default_root_dir {rundir.LOGS} --trainer.max_epochs N"
    train = to_type(
        f'make train CONFIG={best / rundir.CONFIG} RUN={name} ARGS="{options}"',
        f"cait fit --config {best / rundir.CONFIG} --run_name {name} {options}",
    )
    print(f"\nThe best is {best}. Train it longer, from the start:\n  {train}")
    print(f"Score it:\n  {program.command('eval', best)}")

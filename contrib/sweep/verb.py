"""`cait sweep`."""

from importlib.util import find_spec
from pathlib import Path

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, to_install, to_type
from cait.run import rundir
from cait.run.program import Program
from contrib.runner import interruptible

DESCRIPTION = """\
Train the trials of a space of settings and show which are best. What is done is not trained
again, and what was interrupted is resumed: give the same command again. Give it in a second
terminal too, or on a second GPU, and both share the work."""


def sweep(arguments: list[str], program: Program) -> None:
    """Train the missing trials of a sweep and list all, the best first."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("space", metavar="SPACE.yaml", type=Path, help="what to search, a file")
    args = options.parse_args(arguments)
    if not find_spec("optuna"):  # told before anything that takes long
        raise UserError(f"a sweep needs Optuna: {to_install('optuna')}")
    from contrib.sweep import trials
    from contrib.sweep.search_space import SearchSpace

    search = SearchSpace(args.space)
    folder = rundir.LOGS / search.name
    disk.check_inside(folder)
    work = trials.Sweep(search, folder, program)
    with interruptible("trials"):
        work.train()
    ranked = work.ranked()
    for trial in ranked:
        print(trials.in_words(trial, search.metric))
    states = [trial.state.name for trial in ranked]
    if "COMPLETE" in states:
        _say_what_next(trials.trial_folder(folder, ranked[0].number), search.name, program)
    elif {*states} == {"FAIL"}:
        raise UserError(f"all {len(states)} trials of {folder} have failed")


def _say_what_next(best: Path, name: str, program: Program) -> None:
    config = best / rundir.CONFIG
    options = f"--trainer.default_root_dir {rundir.LOGS} --trainer.max_epochs N"
    train = to_type(
        f'make train CONFIG={config} RUN={name}-best ARGS="{options}"',
        f"cait fit --config {config} --run_name {name}-best {options}",
    )
    print(
        f"\nThe best is {best}. Train it longer, from the start:\n  {train}\n"
        f"Score it:\n  {program.command('eval', best)}"
    )

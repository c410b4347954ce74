"""`cait fit` and `cait resume`."""

import sys
from functools import partial
from pathlib import Path

from cait.cli.options import HELP, PRINT_PLAN, TRUST, Line, split_flag, split_run
from cait.errors import UserError, as_typed
from cait.run import rundir
from cait.run.program import NextRun, Program
from cait.settings import Settings

USAGE = """\
usage: cait resume RUN [options of fit]

Continue a run from its last checkpoint, or from --ckpt_path FILE. RUN is a name in logs/ or
the path of a folder. What you give now wins over the run's own settings.

  --print_plan     print what the run would be, and write nothing
  --trust-config   run the code that a run of somebody else names, or one whose config.yaml you
                   have changed. Read that code first: it may do anything."""


def fit(arguments: list[str], program: Program) -> None:
    """Train. Extras may add settings, such as the row of a table."""
    prints_plan, words = split_flag(PRINT_PLAN, arguments)
    others = [word for word in words if word.split("=")[0] not in HELP]
    line = Line("fit", others)
    if len(others) < len(words):
        line.take_classes(program)  # --help lists their settings too
        line = Line("fit", ["--help"])
    line.extend(program)
    train(line, program, prints_plan)


def resume(arguments: list[str], program: Program) -> None:
    if HELP & {*arguments}:
        print(as_typed(USAGE))
        return
    from cait import signature

    prints_plan, words = split_flag(PRINT_PLAN, arguments)
    trusted, words = split_flag(TRUST, words)
    folder, words = split_run("resume", words)
    with signature.only_own(trusted):
        line = continued(folder, words, program)
    _, continuing = line.layers[1]  # what `continued` adds to the run's configuration
    if "ckpt_path" in continuing:
        # the processes that Lightning starts continue from the same one
        sys.argv += ["--ckpt_path", continuing["ckpt_path"]]
    train(line, program, prints_plan)


def train(line: Line, program: Program, prints_plan: bool = False) -> Path:
    """Train, and then the run that a callback asks for in its place. Return the folder of the last.

    With --print_plan only print what it would be.
    """
    from cait.cli.lightning import CaiTCLI

    while True:
        try:
            return CaiTCLI(line, program, prints_plan).run_dir
        except NextRun as other:
            # Not `other` itself, which holds the network of before.
            folder = other.folder
            is_new = other.is_new
            layers = other.layers
        line = Line("fit", []) if is_new else continued(folder, [], program)
        line.layers += [(None, layer) for layer in layers]


def continued(folder: Path, words: list[str], program: Program) -> Line:
    """The command line that goes on with the run in `folder`."""
    from cait.guards import trust

    config = rundir.config(folder)
    read = partial(trust.settings, of_first=program.processes.from_first)
    line = Line("fit", words, read)
    line.layers[:0] = [
        (config, read(config, is_run=True)),
        (None, _continuing(folder, line.typed, program)),
    ]
    return line


def _continuing(folder: Path, typed: set[str], program: Program) -> Settings:
    """The settings that continue a run where it lies: it may have been moved or renamed."""
    from cait.guards.configurations import check_run_name

    try:
        check_run_name(folder.name)
    except UserError as error:
        raise UserError(f"rename the folder {folder}: {error}") from error
    settings: Settings = {
        "trainer": {"default_root_dir": str(folder.parent)},
        "run_name": folder.name,
    }
    if "best_metric" in typed:  # the run's own best_mode was for another
        settings["best_mode"] = None
    if "ckpt_path" not in typed:
        from cait.run.checkpoints import newest_whole

        # One process reads the checksums; it alone decides.
        last = program.processes.from_first(
            lambda: str(newest_whole(folder / rundir.CHECKPOINTS) or "")
        )
        if last:
            settings["ckpt_path"] = last
        else:
            print(f"{folder} has no checkpoint yet: it starts again", flush=True)
    return settings

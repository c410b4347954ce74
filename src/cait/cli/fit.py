"""`cait fit` and `cait resume`."""

from __future__ import annotations

import sys
from pathlib import Path

from cait.cli.options import asks_for_help, replaced, split_run, split_trust
from cait.run import rundir
from cait.run.program import Program

USAGE = """\
usage: cait resume RUN [options of fit]

Continue a run from its last checkpoint, or from --ckpt_path FILE. RUN is a name in logs/ or
the path of a folder. What you give now wins over the run's own settings.

  --trust-config   run the code that a run of somebody else names, or one whose config.yaml you
                   have changed. Read that code first: it may do anything."""


def fit(arguments: list[str], program: Program) -> None:
    """Train. Extras may replace arguments first, such as a row of a table by its settings."""
    if any(argument.split("=")[0] in ("-h", "--help") for argument in arguments):
        arguments = ["--help"]
    settings = replaced("fit", arguments, program)
    from cait.cli.lightning import CaiTCLI

    CaiTCLI(["fit", *settings], program)


def resume(arguments: list[str], program: Program) -> None:
    """Continue a run."""
    if asks_for_help(arguments):
        print(USAGE)
        return
    trusted, given = split_trust(arguments)
    folder, given = split_run("resume", given)
    arguments = _continue(folder, given, program)
    from cait.cli.lightning import CaiTCLI
    from cait.guards import trust

    with trust.only_own(trusted):
        own_settings = trust.own_settings(arguments, program.processes.of_first)
    CaiTCLI(arguments, program, own_settings)


def _continue(folder: Path, overrides: list[str], program: Program) -> list[str]:
    """The arguments of `fit` that continue a run."""
    config = rundir.config(folder)
    # The folder may have been moved or renamed since its configuration was written.
    place = ["--trainer.default_root_dir", str(folder.parent), "--run_name", folder.name]
    named = [override.split("=")[0] for override in overrides]
    if "--best_metric" in named:  # the run's own --best_mode was for another
        place += ["--best_mode", "null"]
    if "--ckpt_path" not in named:
        from cait.run.checkpoints import newest_whole

        # One process reads the checksums; it alone decides.
        last = program.processes.of_first(lambda: str(newest_whole(folder / rundir.CHECKPOINTS) or ""))
        if last:
            place += ["--ckpt_path", last]
            sys.argv += place[-2:]  # the processes that Lightning starts continue from the same one
        else:
            print(f"{folder} has no checkpoint yet: it starts again", flush=True)
    return ["fit", f"--config={config}", *place, *overrides]

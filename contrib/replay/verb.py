"""`cait replay`: its options, and the checkpoint that it starts from."""

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from cait import ckpt, disk, signature
from cait.cli.options import Line, Options
from cait.errors import UserError, to_type
from cait.run import rundir
from cait.run.program import Program

USAGE = """\
cait replay RUN --step N [options] [settings of fit]
       cait replay RUN --step N --data-only [...]
       cait replay --config FILE --step N --data-only [...]"""
DESCRIPTION = """\
Show what training steps of a run saw and did: the images of the batch as the network got them, the loss and
the norms of the gradients. Steps count from 0, as in metrics.csv. The run may still be training."""


def replay(arguments: list[str], program: Program) -> None:
    named = [] if not arguments or arguments[0].startswith("-") else arguments[:1]
    options = Options("replay", DESCRIPTION)
    options.usage = USAGE
    options.add_argument(
        "--step", type=int, required=True, metavar="N", help="step to show, as metrics.csv counts"
    )
    options.add_argument(
        "--count", type=int, default=1, metavar="K", help="steps in a row, from N on; default 1"
    )
    options.add_argument(
        "--data-only", "--data_only", action="store_true", help="the images alone, without a model"
    )
    options.add_argument(
        "--images", type=int, default=256, metavar="M", help="most images to draw; default 256"
    )
    options.add_argument(
        "--ckpt_path",
        type=Path,
        metavar="FILE",
        help="checkpoint to begin from; default the nearest",
    )
    options.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to; default replay/ in the run's",
    )
    options.add_trust()
    asked, given = options.parse_known_args(arguments[len(named) :])
    _check(asked, bool(named), given)
    asked.folder = rundir.folder_of(named[0]) if named else None
    asked.output = asked.output or (asked.folder or Path()) / "replay"
    disk.check_output(asked.output, folder=True)
    _choose_start(asked)
    with _kept_start(asked):
        _run(asked, given, program)


def _check(asked: Namespace, named: bool, settings: list[str]) -> None:
    if asked.step < 0:
        raise UserError(f"--step must be at least 0, got {asked.step}")
    if min(asked.count, asked.images) < 1:
        raise UserError("--count and --images must be at least 1")
    if asked.data_only and asked.ckpt_path:
        raise UserError("--data-only reads no checkpoint: leave out --ckpt_path")
    configured = any(word.split("=")[0] in ("-c", "--config", "--paper") for word in settings)
    if not named and not (asked.data_only and configured):
        command = to_type("make replay RUN=NAME STEP=N", "cait replay NAME --step N")
        raise UserError(
            f"which run? `{command}`; "
            "a configuration without a run takes `cait replay --config FILE --step N --data-only`"
        )


def _choose_start(asked: Namespace) -> None:
    """Set `asked.start`, the last whole checkpoint before the step, and what all say of the data and the epochs.

    They are None without a checkpoint; replay then begins at the first step.
    """
    asked.start = asked.ckpt_path
    asked.data_state = asked.planned = None
    nearest = -1
    for name in (rundir.LAST, rundir.PREVIOUS, rundir.BEST) if asked.folder else ():
        path = asked.folder / rundir.CHECKPOINTS / name
        with contextlib.suppress(UserError):
            checkpoint = ckpt.read_checkpoint(path)
            step = int(checkpoint["global_step"])
            asked.data_state = asked.data_state or ckpt.data_state(checkpoint)
            if nearest < step <= asked.step and not (asked.ckpt_path or asked.data_only):
                nearest = step
                asked.start = path
            plan = checkpoint.get("callbacks", {}).get("Plan")
            disk.check_shape(plan, {"before": int, "epochs": int, "step": int}, path, "Plan")
            asked.planned = asked.planned or plan


@contextlib.contextmanager
def _kept_start(asked: Namespace) -> Iterator[None]:
    """Set `asked.ckpt_path` to a link to the checkpoint or a copy: a run that still trains replaces its own."""
    asked.output.mkdir(parents=True, exist_ok=True)  # callbacks of the run may write there
    kept = disk.scratch(asked.output / "start.ckpt")
    try:
        if asked.start and not asked.ckpt_path:
            try:
                os.link(asked.start, kept)
            except OSError:  # the file system has no links
                shutil.copyfile(asked.start, kept)
            asked.ckpt_path = kept
            # the processes that Lightning starts begin from it too
            sys.argv += [
                "--ckpt_path",
                str(kept),
            ]
        yield
    finally:
        disk.remove(kept)
        with contextlib.suppress(OSError):  # it holds something
            asked.output.rmdir()


def _run(asked: Namespace, given: list[str], program: Program) -> None:
    from cait.guards import trust
    from contrib.replay.retraining import ReplayCLI

    with signature.only_own(asked.trusted):
        line = Line("fit", given, trust.settings)
        if asked.folder:
            config = rundir.config(asked.folder)
            line.layers.insert(0, (config, trust.settings(config, is_run=True)))
        else:
            line.extend(program)
        ReplayCLI(asked, line, program)

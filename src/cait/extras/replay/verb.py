"""`cait replay`: its options, and the checkpoint that it starts from."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cait import ckpt, disk, signature
from cait.cli.options import TRUST, Options, check_folder, replaced, split_trust
from cait.errors import UserError
from cait.guards.configurations import config_files
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
    """Go through steps of a run again."""
    named = [] if not arguments or arguments[0].startswith("-") else arguments[:1]
    trusted, others = split_trust(arguments[len(named) :])
    asked, settings = _options().parse_known_args(others)
    _check(asked, bool(named), settings)
    if not named:
        given, settings = settings, replaced("fit", settings, program)
        asked.folder, output = None, Path("replay")
    else:
        asked.folder = rundir.folder_of(named[0])
        given, output = settings, asked.folder / "replay"
        settings = ["--config", str(rundir.config(asked.folder)), *settings]
    asked.output = asked.output or output
    check_folder(asked.output)
    asked.start = None
    with contextlib.nullcontext() if asked.data_only else _starting_point(asked):
        _run(asked, settings, given, trusted, program)


def _options() -> Options:
    options = Options("replay", DESCRIPTION)
    options.usage = USAGE
    options.add_argument("--step", type=int, required=True, metavar="N", help="step to show, as metrics.csv counts")
    options.add_argument("--count", type=int, default=1, metavar="K", help="steps in a row, from N on; default 1")
    options.add_argument("--data-only", "--data_only", action="store_true", help="the images alone, without a model")
    options.add_argument("--images", type=int, default=256, metavar="M", help="most images to draw; default 256")
    options.add_argument("--ckpt_path", type=Path, metavar="FILE", help="checkpoint to begin from; default the nearest")
    options.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; default replay/ in the run's")
    options.add_argument(TRUST, action="store_true", help="run the code that the run's config.yaml names")
    return options


def _check(asked: Namespace, named: bool, settings: list[str]) -> None:
    if asked.step < 0:
        raise UserError(f"--step must be at least 0, got {asked.step}")
    if min(asked.count, asked.images) < 1:
        raise UserError("--count and --images must be at least 1")
    if asked.data_only and asked.ckpt_path:
        raise UserError("--data-only reads no checkpoint: leave out --ckpt_path")
    if not named and not (
        asked.data_only and any(word.split("=")[0] in ("-c", "--config", "--paper") for word in settings)
    ):
        raise UserError(
            "which run? `make replay RUN=NAME STEP=N`; "
            "a configuration without a run takes `cait replay --config FILE --step N --data-only`"
        )


@contextlib.contextmanager
def _starting_point(asked: Namespace) -> Iterator[None]:
    """Set `asked.start`, the checkpoint to begin from, and `asked.ckpt_path`, a link to it or a copy that stays.

    A run that is still training replaces its checkpoints.
    """
    asked.start = asked.ckpt_path or _nearest(asked.folder, asked.step)
    if asked.ckpt_path or asked.start is None:
        yield
        return
    asked.output.mkdir(parents=True, exist_ok=True)
    asked.ckpt_path = disk.scratch(asked.output / "start.ckpt")
    try:
        _duplicate(asked.start, asked.ckpt_path)
        sys.argv += ["--ckpt_path", str(asked.ckpt_path)]  # the processes that Lightning starts begin from the same one
        yield
    finally:
        disk.remove(asked.ckpt_path)


def _duplicate(path: Any, copy: Any) -> None:
    """Link a file, or the files of a folder, under a second name; copy if the file system has no links."""
    import shutil

    if os.path.isdir(path):
        shutil.copytree(path, copy, copy_function=_duplicate)
        return
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)


def _nearest(folder: Path, step: int) -> Path | None:
    """The last whole checkpoint before `step`; None if there is none, so replay begins at the first step."""
    from cait.run.checkpoints import is_whole

    steps: dict[Path, int] = {}
    for name in (rundir.LAST, rundir.PREVIOUS, rundir.BEST):
        path = folder / rundir.CHECKPOINTS / name
        with contextlib.suppress(UserError):
            steps[path] = int(ckpt.read_checkpoint(path, without=ckpt.TENSORS)["global_step"])
    before = sorted((path for path in steps if steps[path] <= step), key=steps.__getitem__, reverse=True)
    return next(filter(is_whole, before), None)


def _run(asked: Namespace, settings: list[str], given: list[str], trusted: bool, program: Program) -> None:
    from functools import partial

    from cait.cli.lightning import drive
    from cait.extras.replay.retraining import ReplayCLI
    from cait.guards import trust

    own = [signature.own_text(path) for path in config_files(settings)]
    limits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    arguments = ["fit", *settings]
    if asked.data_only:
        limits = trust.only_importing(trust.named(given), "the configuration", "give it on the command line")
    elif not (trusted or own[0]):  # the run's own file; others may follow it
        paths = [*trust.PACKAGES, *trust.named(given)]
        limits = trust.only_importing(paths, str(asked.folder / rundir.CONFIG), f"if you trust it add {TRUST}")
    with limits, contextlib.nullcontext() if trusted else trust.only_objects([*given, *own]):
        drive(partial(ReplayCLI, asked), arguments, program)

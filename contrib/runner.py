"""Train runs from a program that waits for them, each in a process of its own."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cait import disk
from cait.errors import COMMAND, UserError
from cait.guards.configurations import typed
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, as_text

OUTPUT = "output.txt"
"""File in the folder of each run: what its process printed."""
POLL = 1.0
"""Seconds between two looks at a run."""


def train_run(
    program: Program,
    folder: Path,
    settings: Sequence[str],
    variables: dict[str, str] | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """Train a run to its end. If it has a checkpoint, resume it. Ctrl-C has it save and stop.

    Args:
        folder: of the run, which is there.
        settings: arguments of `cait fit`, for a new run.
        variables: of the environment, beside those of this process.
        is_enough: asked every second; once it says so, the run saves and stops.

    Returns:
        the exit status, below 0 the signal that ended the process; None if it was enough.
    """
    if any((folder / rundir.CHECKPOINTS).glob("*.ckpt")):
        arguments = ["resume", str(folder)]
    else:
        refuse_chosen(settings)
        arguments = [
            "fit",
            *settings,
            f"--trainer.default_root_dir={folder.parent}",
            f"--run_name={folder.name}",
        ]
    script = Path(program.script or sys.argv[0])
    # Started as this process was, it looks for modules where this one did: `-m` would put the current folder first.
    is_script = program.script or (script.name == COMMAND.get() and script.is_file())
    command = [sys.executable, *([script] if is_script else ["-m", "cait"]), *arguments]
    with (folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | (variables or {}),
            start_new_session=True,  # Ctrl-C is for this process, which then ends the run
        )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL)
            if is_enough():
                return None
    finally:
        process.terminate()  # nothing, if it has ended
        process.wait()


def arguments_of(*layers: Settings) -> list[str]:
    """Layers of settings as arguments of `cait fit`: a later one wins, and each `key+` appends."""
    chosen: dict[str, list[Any]] = {}
    for name, value in itertools.chain.from_iterable(map(dict.items, layers)):
        before = chosen.get(name, []) if name.endswith("+") else []
        chosen[name] = [*before, value]
    return [f"--{name}={as_text(value)}" for name, values in chosen.items() for value in values]


def refuse_chosen(settings: Sequence[str], *more: str) -> None:
    """Raise UserError if arguments of `cait fit` set what is chosen for each run apart: its place, and `more`."""
    if taken := typed(settings) & {"run_name", "trainer.default_root_dir", *more}:
        raise UserError(
            f"--{' and --'.join(sorted(taken))} cannot be given: each run has its own; leave it out"
        )


@contextlib.contextmanager
def interruptible(what: str) -> Iterator[None]:
    """Take SIGTERM and a closed terminal's SIGHUP as Ctrl-C, and say that the runs, called `what`, have saved."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        print(f"The {what} have saved; the same command continues them", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(folder: Path, status: int) -> str:
    """Why a run ended with this status: the last line that it printed, or the signal that killed it."""
    if status < 0:
        return f"killed by signal {-status}"
    with disk.open_file(folder / OUTPUT) as file:
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix(f"{COMMAND.get()}: error: ") if lines else f"exit status {status}"

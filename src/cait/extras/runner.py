"""Start runs of `cait` from a program: each in a process of its own, several at a time, and stop them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cait import disk
from cait.run import rundir
from cait.run.program import Program

OUTPUT = "output.txt"
"""File in the folder of each run: what its process printed."""
POLL = 1.0
"""Seconds between two looks at a run."""


class Runner:
    """Runs that this process starts and waits for, from one thread or from several.

    Args:
        program: starts the runs.
        what: what the runs are called, as "trials", when they have saved.
    """

    def __init__(self, program: Program, what: str = "runs") -> None:
        self.program, self.what = program, what
        self.stopped = threading.Event()
        self._processes: set[subprocess.Popen[bytes]] = set()

    def run(
        self,
        folder: Path,
        settings: Sequence[str],
        variables: Mapping[str, str],
        is_enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Train a run to its end. If it has a checkpoint, resume it.

        Args:
            folder: of the run.
            settings: arguments of `cait fit`, for a new run.
            variables: of the environment, beside those of this process.
            is_enough: asked every second; once it says so, the run saves and stops.

        Returns:
            the exit status; below 0 the signal that ended the process, SIGTERM once the runs are stopped.
        """
        if self.stopped.is_set():
            return -signal.SIGTERM
        process = self._start(folder, settings, variables)
        if self.stopped.is_set():  # while the process started
            process.terminate()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
                break
            if is_enough():
                process.terminate()
                process.wait()
        self._processes.discard(process)
        return process.returncode

    def _start(self, folder: Path, settings: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if any((folder / rundir.CHECKPOINTS).glob("*.ckpt")):
            arguments = ["resume", str(folder)]
        else:
            arguments = ["fit", *settings, f"--trainer.default_root_dir={folder.parent}", f"--run_name={folder.name}"]
        program = [self.program.script] if self.program.script else ["-m", "cait"]
        with (folder / OUTPUT).open("ab") as output:
            # In a group of its own: Ctrl-C is for this process, which then ends the runs.
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._processes.add(process)
        return process

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that call `run`. An error in the body stops all runs, and so does an interruption.

        Raises:
            KeyboardInterrupt: for Ctrl-C, SIGTERM and a closed terminal's SIGHUP, once the runs have saved.
        """

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        signals = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
        before = {number: signal.signal(number, interrupt) for number in signals}
        try:
            with ThreadPoolExecutor(count) as pool:
                try:
                    yield pool
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.stopped.set()
                    for process in self._processes.copy():
                        process.terminate()
                    raise
        except KeyboardInterrupt:
            print(f"The {self.what} have saved; the same command continues them", file=sys.stderr)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def failure(folder: Path, status: int) -> str:
    """Why a run ended with this status: the last line that it printed, or the signal that killed it."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = disk.open_file(folder / OUTPUT).read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("cait: error: ") if lines else f"exit status {status}"

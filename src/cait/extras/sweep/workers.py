"""The workers of a sweep: each trains one trial after the other, in processes of their own, after any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import IO

from filelock import Timeout
from optuna.trial import TrialState

from cait.errors import DISK_FULL, UserError
from cait.extras.runner import Runner, failure
from cait.extras.sweep import VARIABLE, table, trials
from cait.extras.sweep.search_space import SearchSpace
from cait.file_lock import NO_LOCKS, Lock, file_lock
from cait.run import rundir

LOCKS = ".claims"
"""Folder of locks in the folder of a sweep; they say who trains which trial."""
POLL = 1.0
"""Seconds between checks of the sweep's other processes."""
KILLS = 3
"""Times in a row that a trial may be killed without a new checkpoint; then it counts as failed."""
_print = partial(print, flush=True)


class Workers:
    """Those of this process, each a thread.

    Optuna would restart a trial whose process is gone, under another number. Here the lock of a trial tells whether
    its process lives. If it does not, the next process resumes the trial, which ends bit for bit the same.

    Args:
        search: what the sweep searches.
        folder: the sweep's folder.
        jobs: trials at a time.
        runner: starts the trials.
    """

    def __init__(self, search: SearchSpace, folder: Path, jobs: int, runner: Runner) -> None:
        self.search, self.folder, self.jobs, self.runner = search, folder, jobs, runner
        self._said: set[str] = set()
        self._locks: dict[int, Lock] = {}
        """Kept, because a lease of another machine is taken over after it has been watched for a minute."""
        with self._locked():
            self.study = trials.open_study(folder, search)

    def train(self) -> None:
        """Train until all trials have ended, here or in other processes."""
        with self.runner.threads(self.jobs) as pool:
            for worker in as_completed([pool.submit(self._work, place) for place in range(self.jobs)]):
                worker.result()

    def _work(self, worker: int) -> None:
        """Train one trial after the other, as the worker of this number."""
        _keep_to_share(worker, self.jobs)
        while not self.runner.stopped.is_set():
            if found := self._next_trial():
                number, lock = found
                with lock:
                    self._train(number, worker)
            elif running := self._numbers(TrialState.RUNNING):
                names = ", ".join(f"trial-{number:03}" for number in running)
                self._say_once(f"waiting for {names}, which other processes train")
                self.runner.stopped.wait(POLL)
            else:
                return

    def _numbers(self, *states: TrialState) -> list[int]:
        return [trial.number for trial in self.study.get_trials(deepcopy=False, states=states)]

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """The lock under which one process at a time begins or ends a trial."""
        return file_lock(self.folder / LOCKS / "sweep.lock")

    def _next_trial(self) -> tuple[int, Lock] | None:
        """The number and the lock of the next trial to train; None if no trial is left.

        A trial whose process has ended too early comes first, then a new one.
        """
        with self._locked():
            for number in self._numbers(TrialState.RUNNING):
                with contextlib.suppress(Timeout):
                    return number, self._lock(number)
            if len(self.study.trials) >= self.search.trials:
                return None
            number = self.study.ask().number
            trials.values_of(self.study, self.search, number)
            return number, self._lock(number)

    def _lock(self, number: int) -> Lock:
        lock = self._locks.setdefault(number, Lock(self.folder / LOCKS / f"{number:03}.lock"))
        lock.acquire(0)
        return lock

    def _train(self, number: int, worker: int) -> None:
        """Train a trial to its end and note what it reached."""
        folder = trials.trial_folder(self.folder, number)
        values = trials.values_of(self.study, self.search, number)
        _print(f"{folder.name}  {'  '.join(f'{name}={table.short(value)}' for name, value in values.items())}")
        folder.mkdir(exist_ok=True)
        start = time.monotonic()
        with (self.folder / LOCKS / f"{number:03}.process").open("a") as file:
            status = self._run(number, worker, file, self.search.arguments(values))
        if status is not None:
            self._end(number, folder, status, time.monotonic() - start)

    def _run(self, number: int, worker: int, file: IO[str], settings: list[str]) -> int | None:
        """The exit status of a trial, which is resumed if it is killed; None if the sweep is stopped.

        The process of the trial inherits `file`, which is locked as long as it lives.
        """
        folder = trials.trial_folder(self.folder, number)
        while not _is_locked(file):  # a sweep that is killed leaves its trial training
            self._say_once(f"waiting for the process of {folder.name}, which a killed sweep has left")
            if self.runner.stopped.wait(POLL):
                return None
        variables = {VARIABLE: str(number)} if self.search.pruner != "none" else {}
        if self.jobs > 1 and (devices := _devices()):  # a GPU for each
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
        kills, checkpoint = 0, 0
        while trials.STOPPED not in self.study.trials[number].user_attrs:
            status = self.runner.run(folder, settings, variables, [file.fileno()])
            if status and self.runner.stopped.is_set():
                return None
            if 0 <= status < 128:
                return status
            newest = max((path.stat().st_mtime_ns for path in (folder / rundir.CHECKPOINTS).glob("*.ckpt")), default=0)
            kills, checkpoint = (kills + 1 if newest == checkpoint else 1), newest
            _print(f"{folder.name}  was killed (exit status {status})")
            if kills == KILLS:
                return status
        return 0

    def _end(self, number: int, folder: Path, status: int, seconds: float) -> None:
        """Note the end of a trial.

        Raises:
            UserError: `fit` has refused the trial before any trial began, or the disk is full.
        """
        best = table.best_value(folder, self.search)
        cause = failure(folder, status) if status else None
        if status == 2 and not trials.has_begun(self.folder):
            raise UserError(f"{self.search.path}: {folder.name}: {cause}")
        if cause and any(os.strerror(code) in cause for code in DISK_FULL):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        if best is None and cause is None:
            cause = f"it has no finite {self.search.metric}"
        with self._locked():
            trial = trials.trial_of(self.study, number)
            trial.set_user_attr(trials.SECONDS, seconds)
            if cause is not None:
                result, state = f"failed: {cause}", TrialState.FAIL
                trial.set_user_attr(trials.CAUSE, cause)
            elif trials.STOPPED in trial.user_attrs:
                result, state = f"{self.search.metric} {best:.5g}  stopped early", TrialState.PRUNED
            else:
                result, state = f"{self.search.metric} {best:.5g}", TrialState.COMPLETE
            self.study.tell(number, best if state == TrialState.COMPLETE else None, state)
        ended = len(self._numbers(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        _print(f"{folder.name}  {result}  {seconds:.0f} s  {ended} of {self.search.trials} done")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            _print(line)
        self._said.add(line)


def _is_locked(file: IO[str]) -> bool:
    """Lock a file, unless another process holds its lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # without locks nothing tells whether a killed sweep has left the trial training
        return error.errno in NO_LOCKS
    return True


def _devices() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]


def _keep_to_share(worker: int, jobs: int) -> None:
    """Give this thread, and the processes that it starts, its share of the cores."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[worker::jobs]
        if cores:
            os.sched_setaffinity(0, cores)

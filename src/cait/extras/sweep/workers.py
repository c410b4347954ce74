"""The workers of a sweep: each has Optuna train one trial after the other, in processes of their own."""

from __future__ import annotations

import os
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path

from filelock import Timeout
from optuna import Trial, TrialPruned
from optuna.storages import fail_stale_trials

from cait.errors import DISK_FULL, UserError
from cait.extras.runner import Runner, failure
from cait.extras.sweep import studies, table
from cait.extras.sweep.search_space import SearchSpace
from cait.file_lock import acquire
from cait.run import rundir

KILLS = 3
"""Times that a trial may be killed; then it counts as failed."""
_print = partial(print, flush=True)


class TrialError(Exception):
    """A trial ended without a value; the sweep goes on."""


class Workers:
    """Those of this process, each a thread.

    Args:
        search: what the sweep searches.
        folder: the sweep's folder.
        jobs: trials at a time.
        runner: starts the trials.
    """

    def __init__(self, search: SearchSpace, folder: Path, jobs: int, runner: Runner) -> None:
        self.search, self.folder, self.jobs, self.runner = search, folder, jobs, runner
        studies.create(folder, search)

    def train(self) -> None:
        """Train until all trials have ended, here or in other processes."""
        with self.runner.threads(self.jobs) as pool:
            self._await_stale()
            for worker in as_completed([pool.submit(self._work, place) for place in range(self.jobs)]):
                worker.result()

    def _await_stale(self) -> None:
        """Wait until it is known which trials run elsewhere, so that those of a killed sweep come first."""
        study = studies.load(self.folder)
        if studies.running(study):
            _print(f"waiting up to {studies.GRACE} s to see whether the trials that have begun are still trained")
        for _ in range(studies.GRACE + 1):
            fail_stale_trials(study)
            if not studies.running(study) or self.runner.stopped.wait(1):
                break

    def _work(self, worker: int) -> None:
        """Train one trial after the other, as the worker of this number."""
        _keep_to_share(worker, self.jobs)
        study = studies.load(self.folder, self.search)
        while not self.runner.stopped.is_set():
            if studies.can_begin(study, self.search):
                study.optimize(partial(self._train, worker), n_trials=1, catch=TrialError)
            elif studies.running(study):  # in other processes, or of one that was killed
                self.runner.stopped.wait(1)
                fail_stale_trials(study)
            else:
                return

    def _train(self, worker: int, trial: Trial) -> float:
        """The objective: train a trial to its end, and give its best value."""
        place = studies.place_of(trial)
        if place >= self.search.trials:  # another process began the last one at the same moment
            raise TrialError
        folder = studies.trial_folder(self.folder, place)
        folder.mkdir(exist_ok=True)
        trial.study.sampler = self.search.sampler(place)
        values = self.search.draw(trial)
        _print(f"{folder.name}  {'  '.join(f'{name}={table.short(value)}' for name, value in values.items())}")
        reports = studies.Reports(trial, folder, self.search.metric)
        try:
            status = self._run(worker, folder, self.search.arguments(values), reports)
            return self._result(folder, status, reports)
        except (UserError, Timeout):
            studies.retry(trial.study, trial.study.trials[trial.number])
            raise

    def _run(self, worker: int, folder: Path, settings: list[str], reports: studies.Reports) -> int:
        """The exit status of a trial, which is resumed if it is killed."""
        # A sweep that is killed may leave its trial training.
        acquire(folder / rundir.LOCK, -1, self.runner.stopped.is_set).release()
        variables = {}
        if self.jobs > 1 and (devices := _devices()):  # a GPU for each
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
        for _ in range(KILLS):
            status = self.runner.run(folder, settings, variables, reports)
            if reports() or 0 <= status < 128 or self.runner.stopped.is_set():
                break
            _print(f"{folder.name}  was killed (exit status {status})")
        return status

    def _result(self, folder: Path, status: int, reports: studies.Reports) -> float:
        """The value of a trial that has ended.

        Raises:
            TrialPruned: the pruner stopped it.
            TrialError: it has no value; the attribute "cause" says why.
            Timeout: the sweep is stopped.
            UserError: `fit` has refused the trial before any trial began, or the disk is full.
        """
        done = f"{self.search.metric} {table.best(reports.values, self.search):.5g}" if reports.values else ""
        if reports.pruned:
            _print(f"{folder.name}  {done}  stopped early")
            raise TrialPruned
        if status and self.runner.stopped.is_set():
            raise Timeout(str(folder))
        cause = failure(folder, status) if status else "" if done else f"it has no finite {self.search.metric}"
        if status == 2 and not studies.has_begun(self.folder):
            raise UserError(f"{self.search.path}: {folder.name}: {cause}")
        if any(os.strerror(code) in cause for code in DISK_FULL):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        _print(f"{folder.name}  {f'failed: {cause}' if cause else done}")
        if cause:
            reports.trial.set_user_attr("cause", cause)
            raise TrialError
        return table.best(reports.values, self.search)


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

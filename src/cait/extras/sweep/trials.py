"""The trials of a sweep: Optuna's study keeps them, and each trains in a process of its own."""

from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna import Study, Trial, TrialPruned
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from cait.errors import DISK_FULL, UserError
from cait.extras import curves
from cait.extras.runner import Runner, failure
from cait.extras.sweep.search_space import SearchSpace
from cait.file_lock import file_lock
from cait.run import rundir

STUDY = "study.db"
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE = "space"
"""Attribute of the study: what its SPACE.yaml said."""
CAUSE = "cause"
"""Attribute of a trial: why it failed."""
BEAT, GRACE = 5, 30
"""Seconds between the heartbeats of a trial, and after the last one until another process goes on with it."""

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would tell of each trial
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
retry = RetryHeartbeatStaleTrialCallback()
"""Queue a trial again, as retry(study, trial): another number, the same values and the same run."""
_print = partial(print, flush=True)


class TrialError(Exception):
    """A trial ended without a value; the sweep goes on."""


def load(folder: Path, search: SearchSpace) -> Study:
    """The study in a sweep's folder."""
    if not (folder / STUDY).is_file():
        raise UserError(f"{folder / STUDY} is missing, so {folder} is no sweep")
    return optuna.load_study(study_name=NAME, storage=_storage(folder), pruner=search.pruner)


def create(folder: Path, search: SearchSpace) -> Study:
    """The study in a sweep's folder, made if it is not there.

    Raises:
        UserError: it has begun with another search space.
    """
    told = {key: value for key, value in search.content.items() if key not in ("name", "trials")}
    now = json.dumps(told, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / ".study.lock"):
        if (folder / STUDY).is_file() and load(folder, search).user_attrs.get(SPACE) != now:
            if has_begun(folder):
                raise UserError(f"{folder} has trials of another space than {search.path}; give it another `name:`")
            (folder / STUDY).unlink()
        made = optuna.create_study(
            study_name=NAME, storage=_storage(folder), direction=search.direction, load_if_exists=True
        )
        made.set_user_attr(SPACE, now)
    return load(folder, search)


def _storage(folder: Path) -> RDBStorage:
    return RDBStorage(
        f"sqlite:///{(folder / STUDY).resolve()}",
        engine_kwargs={"connect_args": {"timeout": 120}},
        heartbeat_interval=BEAT,
        grace_period=GRACE,
        heartbeat_stale_trial_callback=retry,
    )


def has_begun(folder: Path) -> bool:
    """Whether any trial has begun to train."""
    return any(folder.glob(f"trial-*/{rundir.CONFIG}"))


def trial_folder(folder: Path, place: int) -> Path:
    return folder / f"trial-{place:03}"


def last_tries(study: Study) -> dict[int, FrozenTrial]:
    """The trials by their place in the sweep, each in its last try, because a retry has a number of its own."""
    found: dict[int, FrozenTrial] = {}
    firsts: list[int] = []
    for trial in study.get_trials(deepcopy=False):
        first = retry.retried_trial_number(trial)
        if first is None:
            first = trial.number
            firsts.append(first)
        found[firsts.index(first)] = trial
    return found


def place_of(trial: Trial) -> int:
    return next(place for place, last in last_tries(trial.study).items() if last.number == trial.number)


def can_begin(study: Study, search: SearchSpace) -> bool:
    """Whether a trial waits for its next try, or has not begun."""
    tries = last_tries(study)
    return len(tries) < search.trials or any(trial.state == TrialState.WAITING for trial in tries.values())


class Reports:
    """Reports the validations of a trial, as its run logs them; when called, says whether the pruner stops it.

    Validations count from 0, whatever their steps.
    """

    def __init__(self, trial: Trial, folder: Path, search: SearchSpace) -> None:
        self.trial, self.folder, self.search = trial, folder, search
        self.values: list[float] = []
        self.pruned = False

    def __call__(self) -> bool:
        for value in [] if self.pruned else self._logged()[len(self.values) :]:
            self.trial.report(value, len(self.values))
            self.values.append(value)
            if self.trial.should_prune():
                self.pruned = True
                break
        return self.pruned

    def _logged(self) -> list[float]:
        try:
            return curves.read(self.folder).get(self.search.metric, ([], []))[1]
        except UserError:  # the run has logged nothing yet
            return []

    @property
    def best(self) -> float:
        """The best value, that of best.ckpt."""
        return max(self.values) if self.search.mode == "max" else min(self.values)


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
        self.study = create(folder, search)

    def train(self) -> None:
        """Train until no trial is left to begin."""
        with self.runner.threads(self.jobs) as pool:
            self._await_stale()
            for worker in as_completed([pool.submit(self._work, number) for number in range(self.jobs)]):
                worker.result()

    def _await_stale(self) -> None:
        """Wait until it is known which trials run elsewhere, so that those of a killed sweep come first."""
        if self._is_any_running():
            _print(f"waiting up to {GRACE} s to see whether the trials that have begun are still trained")
        for _ in range(GRACE + 1):
            fail_stale_trials(self.study)
            if not self._is_any_running() or self.runner.stopped.wait(1):
                break

    def _is_any_running(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _work(self, worker: int) -> None:
        """Train one trial after the other, as the worker of this number."""
        if self.jobs > 1 and hasattr(os, "sched_setaffinity"):  # also of the processes that this thread starts
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[worker :: self.jobs] or os.sched_getaffinity(0))
        study = load(self.folder, self.search)  # a sampler of its own
        while not self.runner.stopped.is_set() and can_begin(study, self.search):
            study.optimize(partial(self._train, worker), n_trials=1, catch=TrialError)

    def _train(self, worker: int, trial: Trial) -> float:
        """The objective: train a trial to its end, and give its best value."""
        place = place_of(trial)
        if place >= self.search.trials:  # another process began the last one at the same moment
            raise TrialError
        folder = trial_folder(self.folder, place)
        folder.mkdir(exist_ok=True)
        trial.study.sampler = self.search.sampler(place)
        values = self.search.draw(trial)
        _print(f"{folder.name}  {'  '.join(f'{name}={short(value)}' for name, value in values.items())}")
        reports = Reports(trial, folder, self.search)
        variables = {}
        if self.jobs > 1 and (devices := _devices()):  # a GPU for each
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
        try:
            with FileLock(folder / rundir.LOCK).acquire(cancel_check=self.runner.stopped.is_set):
                pass  # a sweep that is killed may leave its trial training
            status = self.runner.run(folder, self.search.arguments(values), variables, reports)
            return self._result(folder, status, reports)
        except (UserError, Timeout):
            retry(trial.study, trial.study.trials[trial.number])
            raise

    def _result(self, folder: Path, status: int, reports: Reports) -> float:
        """The value of a trial that has ended.

        Raises:
            TrialPruned: the pruner stopped it.
            TrialError: it has no value; the attribute "cause" says why.
            Timeout: the sweep is stopped.
            UserError: `fit` has refused the trial before any trial began, or the disk is full.
        """
        reports()
        done = f"{self.search.metric} {reports.best:.5g}" if reports.values else ""
        if reports.pruned:
            _print(f"{folder.name}  {done}  stopped early")
            raise TrialPruned
        if status and self.runner.stopped.is_set():
            raise Timeout(str(folder))
        cause = failure(folder, status) if status else ""
        if status == 2 and not has_begun(self.folder):
            raise UserError(f"{self.search.path}: {folder.name}: {cause}")
        if any(os.strerror(code) in cause for code in DISK_FULL):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        if not status and not reports.values:
            cause = f"it has no finite {self.search.metric}"
        _print(f"{folder.name}  {f'failed: {cause}' if cause else done}")
        if cause:
            reports.trial.set_user_attr(CAUSE, cause)
            raise TrialError
        return reports.best


def short(value: object) -> str:
    """A value as text, rounded for display."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _devices() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]

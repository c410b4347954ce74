"""The trials of a sweep: Optuna's study keeps them, and each trains in a process of its own."""

from __future__ import annotations

import json
import os
import warnings
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
PLACE, CAUSE = "place", "cause"
"""Attributes of a trial: its place in the sweep, and why it failed."""
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


def first_tries(study: Study) -> list[FrozenTrial]:
    """The trials without their retries, in the order in which they began."""
    return [each for each in study.get_trials(deepcopy=False) if retry.retried_trial_number(each) is None]


def last_tries(study: Study) -> dict[int, FrozenTrial]:
    """The trials by their place in the sweep, each in its last try."""
    return {each.user_attrs[PLACE]: each for each in study.get_trials(deepcopy=False) if PLACE in each.user_attrs}


def place_of(trial: Trial) -> int:
    """The place of a trial in the sweep, which it notes."""
    first = retry.retried_trial_number(trial.study.trials[trial.number])
    numbers = [each.number for each in first_tries(trial.study)]
    place = numbers.index(trial.number if first is None else first)
    trial.set_user_attr(PLACE, place)
    return place


def can_begin(study: Study, search: SearchSpace) -> bool:
    """Whether a trial waits for its next try, or has not begun."""
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return bool(waiting) or len(first_tries(study)) < search.trials


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


class Sweep:
    """The work of this process on a sweep, one trial after the other.

    Args:
        search: what the sweep searches.
        folder: the sweep's folder.
        runner: starts the trials.
    """

    def __init__(self, search: SearchSpace, folder: Path, runner: Runner) -> None:
        self.search, self.folder, self.runner = search, folder, runner
        self.study = create(folder, search)

    def train(self) -> None:
        """Train until no trial is left to begin."""
        self._await_stale()
        while not self.runner.stopped.is_set() and can_begin(self.study, self.search):
            self.study.optimize(self._train, n_trials=1, catch=TrialError)

    def _await_stale(self) -> None:
        """Wait until it is known which trials run elsewhere, so that those of a killed sweep come first."""
        for second in range(GRACE + 1):
            fail_stale_trials(self.study)
            if not self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                break
            if second == 0:
                _print(f"waiting up to {GRACE} s to see whether the trials that have begun are still trained")
            if self.runner.stopped.wait(1):
                break

    def _train(self, trial: Trial) -> float:
        """The objective: train a trial to its end, and give its best value."""
        place = place_of(trial)
        if place >= self.search.trials:  # another process began the last one at the same moment
            raise TrialError
        folder = trial_folder(self.folder, place)
        folder.mkdir(exist_ok=True)
        self.study.sampler = self.search.sampler(place)
        values = self.search.draw(trial)
        _print(f"{folder.name}  {'  '.join(f'{name}={short(value)}' for name, value in values.items())}")
        reports = Reports(trial, folder, self.search)
        try:
            with FileLock(folder / rundir.LOCK).acquire(cancel_check=self.runner.stopped.is_set):
                pass  # a sweep that is killed may leave its trial training
            return self._result(folder, self.runner.run(folder, self.search.arguments(values), {}, reports), reports)
        except (UserError, Timeout):
            retry(self.study, self.study.trials[trial.number])
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

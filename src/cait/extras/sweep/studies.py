"""Optuna's study of a sweep: how it is opened, which try of a trial counts, and what a trial reports."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import optuna
from optuna import Study, Trial
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from cait.errors import UserError
from cait.extras import curves
from cait.extras.sweep.search_space import SearchSpace
from cait.file_lock import file_lock
from cait.run import rundir

STUDY = "study.db"
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE = "space"
"""Attribute of the study: what its SPACE.yaml said."""
BEAT, GRACE = 5, 30
"""Seconds between the heartbeats of a trial, and after the last one until another process goes on with it."""
MAY_CHANGE = ("name", "trials")
"""Keys that may change while a sweep goes on."""

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would tell of each trial
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
retry = RetryHeartbeatStaleTrialCallback()
"""Queue a trial again, as retry(study, trial): another number, the same values and the same run."""


def create(folder: Path, search: SearchSpace) -> None:
    """Create the study of a sweep in its folder, unless it is there.

    Raises:
        UserError: it has begun with another search space.
    """
    path = folder / STUDY
    now = json.dumps({key: value for key, value in search.content.items() if key not in MAY_CHANGE}, sort_keys=True)
    with file_lock(folder / ".study.lock"):
        if (load(folder).user_attrs.get(SPACE) if path.is_file() else None) != now:
            if has_begun(folder):
                raise UserError(
                    f"{folder} has trials of another space than {search.path}; give that one another `name:`"
                )
            path.unlink(missing_ok=True)
        study = optuna.create_study(
            study_name=NAME, storage=_storage(path), direction=search.direction, load_if_exists=True
        )
        study.set_user_attr(SPACE, now)


def load(folder: Path, search: SearchSpace | None = None) -> Study:
    """The study in a sweep's folder, with the pruner of `search`."""
    path = folder / STUDY
    if not path.is_file():
        raise UserError(f"{path} is missing, so {folder} is no sweep")
    return optuna.load_study(study_name=NAME, storage=_storage(path), pruner=search.pruner if search else None)


def _storage(path: Path) -> RDBStorage:
    return RDBStorage(
        f"sqlite:///{path.resolve()}",
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


def running(study: Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


class Reports:
    """Reports the validations of a trial, as its run logs them; when called, says whether the pruner stops it.

    Validations count from 0, whatever their steps.
    """

    def __init__(self, trial: Trial, folder: Path, metric: str) -> None:
        self.trial, self.folder, self.metric = trial, folder, metric
        self.values: list[float] = []
        self.pruned = False

    def __call__(self) -> bool:
        for value in [] if self.pruned else logged(self.folder, self.metric)[len(self.values) :]:
            self.trial.report(value, len(self.values))
            self.values.append(value)
            if self.trial.should_prune():
                self.pruned = True
                break
        return self.pruned


def logged(folder: Path, metric: str) -> list[float]:
    """What a run has logged so far."""
    try:
        return curves.read(folder).get(metric, ([], []))[1]
    except UserError:
        return []

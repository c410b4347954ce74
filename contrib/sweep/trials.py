"""The trials of a sweep: Optuna's study keeps them, and each trains in a process of its own."""

import json
import os
from contextlib import suppress
from pathlib import Path

import optuna
from filelock import Timeout
from optuna import Study, Trial
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from cait.disk import acquire_lock, file_lock
from cait.errors import DISK_FULL, UserError
from cait.extras import curves
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings
from contrib.runner import failure, train_run
from contrib.sweep.search_space import SearchSpace

STUDY = "study.db"
LOCK = ".sweep.lock"
"""File in the folder of the sweep, and in that of each trial, where the process that trains it holds it."""
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE = "space"
"""Attribute of the study: what its SPACE.yaml said."""
CAUSE = "cause"
"""Attribute of a trial: why it failed."""

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would tell of each trial


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03}"


class Sweep:
    """The work of this process on a sweep, one trial after the other.

    Raises UserError if the folder has trials of another search space.
    """

    def __init__(self, search: SearchSpace, folder: Path, program: Program) -> None:
        self.search = search
        self.folder = folder
        self.program = program
        with file_lock(folder / LOCK):
            self.study = self._open()
        self.guard = rundir.FolderGuard(folder)

    def _open(self) -> Study:
        search = self.search
        space = json.dumps(search.told, sort_keys=True)
        address = f"sqlite:///{(self.folder / STUDY).resolve()}"
        study = optuna.create_study(
            study_name=NAME,
            storage=address,
            direction="maximize" if search.is_max else "minimize",
            pruner=search.pruner,
            load_if_exists=True,
        )
        if SPACE not in study.user_attrs:
            for point in search.grid:
                study.enqueue_trial(point, skip_if_exists=True)
            study.set_user_attr(SPACE, space)
        elif study.user_attrs[SPACE] != space:
            if self._has_begun():
                raise UserError(
                    f"{self.folder} has trials of another space than {search.path}; give another `name:`"
                )
            optuna.delete_study(study_name=NAME, storage=address)
            return self._open()
        return study

    def _has_begun(self) -> bool:
        return any(self.folder.glob(f"trial-*/{rundir.CONFIG}"))

    def train(self) -> None:
        """Train until no trial is left to begin."""
        while trial := self.next_trial():
            print(
                trial_folder(self.folder, trial.number).name,
                *_assigned(trial),
                sep="  ",
                flush=True,
            )
            value, state = self._train(trial)
            print(in_words(self.study.tell(trial, value, state), self.search.metric), flush=True)

    def next_trial(self) -> Trial | None:
        """A trial of an interrupted sweep, or a new one. Until the next call no other process trains it."""
        self.guard.check()
        with file_lock(self.folder / LOCK):
            trials = self.study.get_trials(deepcopy=False)
            for trial in trials:
                # who began it has ended
                if trial.state == TrialState.RUNNING and self._hold(trial.number):
                    return Trial(self.study, trial._trial_id)
            if len(trials) >= self.search.trials and all(
                trial.state != TrialState.WAITING for trial in trials
            ):
                return None
            self.study.sampler = self.search.sampler(len(trials))
            new = self.study.ask(self.search.axes)
            self._hold(new.number)
            return new

    def _hold(self, number: int) -> bool:
        """Hold a trial, if no other process does."""
        folder = trial_folder(self.folder, number)
        folder.mkdir(exist_ok=True)
        with suppress(Timeout):
            self._held = acquire_lock(folder / LOCK, 0)
            return True
        return False

    def _train(self, trial: Trial) -> tuple[float | None, TrialState]:
        """Train a trial to its end, and give its best value.

        Raises UserError if `fit` has refused the trial before any trial began, or the disk is full.
        """
        folder = trial_folder(self.folder, trial.number)
        # a sweep that is killed may leave its trial training, also in the folder of its race
        for pattern in (rundir.LOCK, f"*/{rundir.LOCK}", rundir.LOCK):
            for lock in folder.glob(pattern):
                with file_lock(lock):
                    pass
        status = train_run(
            self.program,
            folder,
            self.search.arguments(self._params(trial)),
            is_enough=lambda: self.prunes(trial),
        )
        self.guard.check()
        if status is None or self.prunes(trial):
            return None, TrialState.PRUNED
        cause = failure(folder, status) if status else ""
        if status == 2 and not self._has_begun():
            raise UserError(f"{self.search.path}: {folder.name}: {cause}")
        if any(os.strerror(code) in cause for code in DISK_FULL):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        values = self._reported(trial)
        if not (cause or values):
            cause = f"it has no finite {self.search.metric}"
        if cause:
            trial.set_user_attr(CAUSE, cause)
            return None, TrialState.FAIL
        return (max if self.search.is_max else min)(values), TrialState.COMPLETE

    def _params(self, trial: Trial) -> Settings:
        """The values of a trial. Raises UserError if the study, a file, has any that the space does not have."""
        axes = self.search.axes
        for name, value in trial.params.items():
            if name not in axes or not _is_on(axes[name], value):
                raise UserError(
                    f"{self.folder / STUDY}: trial {trial.number} has {name} {value!r}, which {self.search.path} "
                    "does not have; give another `name:`"
                )
        return trial.params

    def prunes(self, trial: Trial) -> bool:
        """Report the validations that a trial's run has logged by now, and say whether the pruner stops the trial.

        They count from 0, whatever their steps.
        """
        known = len(self._reported(trial))
        try:
            logged = curves.read(trial_folder(self.folder, trial.number))
        except UserError:  # nothing yet
            return False
        _, values = logged.get(self.search.metric, ([], []))
        for number, value in enumerate(values[known:], known):
            trial.report(value, number)
            if trial.should_prune():
                return True
        return False

    def _reported(self, trial: Trial) -> list[float]:
        return [*self.study.get_trials(deepcopy=False)[trial.number].intermediate_values.values()]

    def ranked(self) -> list[FrozenTrial]:
        """The trials that have begun: those that came to their end first, the best first among them."""
        sign = -1 if self.search.is_max else 1
        return sorted(
            (trial for trial in self.study.trials if trial.state != TrialState.WAITING),
            key=lambda trial: (
                trial.state != TrialState.COMPLETE,
                trial.value is None,
                sign * (trial.value or 0.0),
            ),
        )


def _is_on(axis: BaseDistribution, value: object) -> bool:
    """Whether an axis of the space has this value."""
    try:
        return axis._contains(axis.to_internal_repr(value))
    except (TypeError, ValueError):
        return False


def in_words(trial: FrozenTrial, metric: str) -> str:
    """A line that says what a trial is and how far it came."""
    value = "-" if trial.value is None else _short(trial.value)
    head = f"trial-{trial.number:03}  {trial.state.name.lower():8}  {metric} {value}"
    return "  ".join([head, *_assigned(trial), trial.user_attrs.get(CAUSE, "")]).rstrip()


def _assigned(trial: Trial | FrozenTrial) -> list[str]:
    return [f"{name}={_short(value)}" for name, value in trial.params.items()]


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)

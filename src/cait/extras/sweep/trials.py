"""The trials of a sweep in Optuna's study: how they are opened, what they draw, and which of them stop early."""

from __future__ import annotations

import json
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from cait.errors import UserError
from cait.extras.sweep.search_space import DEFAULTS, SearchSpace
from cait.run import rundir

STUDY = "study.db"
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE, CAUSE, SECONDS, STOPPED = "space", "cause", "seconds", "stopped"
"""Attributes: the study's search space; why a trial failed, how long it took, after which step it was stopped."""

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would tell of each trial
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def open_study(folder: Path, search: SearchSpace | None = None) -> Study:
    """The study of a sweep's folder; it is created if `search` is given.

    Raises:
        UserError: there is none, or it has begun with another search space.
    """
    path = folder / STUDY
    if search is None and not path.is_file():
        raise UserError(f"{path} is missing, so {folder} is no sweep")
    if not path.is_file() and has_begun(folder):
        raise UserError(f"{folder} has trials, but {path} is missing; move the folder away")
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{path.resolve()}", engine_kwargs={"connect_args": {"timeout": 120}}
    )
    if search is None:
        return optuna.load_study(study_name=NAME, storage=storage)
    study = optuna.create_study(
        study_name=NAME, storage=storage, direction=search.direction, load_if_exists=True, sampler=Sampler(search)
    )
    before, now = json.loads(study.user_attrs.get(SPACE, "null")), search.content
    # Only the number of trials may change while a sweep goes on.
    if before and any(before.get(key) != now.get(key) for key in DEFAULTS.keys() - {"name", "trials"}):
        if has_begun(folder):
            raise UserError(
                f"{folder} was begun with another space than {search.path} now says; give that one a `name:` of its own"
            )
        optuna.delete_study(study_name=NAME, storage=storage)
        return open_study(folder, search)
    study.set_user_attr(SPACE, json.dumps(now))
    return study


def search_space_of(study: Study, folder: Path) -> SearchSpace:
    """The search space that a study was begun with."""
    return SearchSpace(folder / STUDY, json.loads(study.user_attrs[SPACE]))


def has_begun(folder: Path) -> bool:
    """Whether any trial has begun to train."""
    return any(folder.glob(f"trial-*/{rundir.CONFIG}"))


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03}"


class Sampler(RandomSampler):
    """Draws each value by itself, as a random sampler does, by the sampler that the search space names.

    It is seeded by the trial and the setting, so a sweep that was killed between a trial's values goes on with the
    values that it would have drawn.
    """

    def __init__(self, search: SearchSpace) -> None:
        super().__init__()
        self.search = search

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        if self.search.sampler == "grid":
            return self.search.point(trial.number)[param_name]
        text = f"{self.search.seed} {trial.number} {param_name}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest())
        if self.search.sampler == "random":
            return RandomSampler(seed=seed).sample_independent(study, trial, param_name, param_distribution)
        tpe = TPESampler(seed=seed, multivariate=False, constant_liar=True, **self.search.sampler_options)
        return tpe.sample_independent(study, trial, param_name, param_distribution)


def make_pruner(search: SearchSpace) -> BasePruner:
    pruners: dict[str, Any] = {"none": NopPruner, "median": MedianPruner, "hyperband": HyperbandPruner}
    return pruners[search.pruner](**search.pruner_options)


def values_of(study: Study, search: SearchSpace, number: int) -> dict[str, Any]:
    """The values of a trial, drawn now unless a process before this one has drawn them."""
    trial = trial_of(study, number)
    return {name: trial._suggest(name, axis) for name, axis in search.axes.items()}


def trial_of(study: Study, number: int) -> Trial:
    """A trial that some process has begun, to go on with."""
    return Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


def is_pruned(study: Study, pruner: BasePruner, number: int) -> bool:
    """Whether the pruner stops a trial after its last report.

    All reports are repeated in memory, this trial's last. So the answer depends on them alone, and a kill between
    a report and its answer changes nothing. Validations count from 0, whatever their steps.
    """
    copied = optuna.create_study(study_name=NAME, direction=study.direction, pruner=pruner)
    trials = study.get_trials(deepcopy=False)
    copies, answer = [copied.ask() for _ in trials], False
    for trial in sorted(trials, key=lambda trial: (trial.number == number, trial.number)):
        copy = copies[trial.number]
        for place, (_, value) in enumerate(sorted(trial.intermediate_values.items())):
            copy.report(value, place)
            answer = copy.should_prune()
        if trial.state.is_finished():
            copied.tell(copy, trial.value if trial.state == TrialState.COMPLETE else None, trial.state)
    return answer

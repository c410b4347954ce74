"""The trials of a sweep in Optuna's study: how they are opened, what they draw, and which of them stop early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.errors import UserError
from cait.extras.sweep.search_space import SearchSpace, optuna
from cait.run import rundir

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

STUDY = "study.db"
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE, CAUSE, SECONDS, STOPPED = "space", "cause", "seconds", "stopped"
"""Attributes: the study's search space; why a trial failed, how long it took, after which step it was stopped."""


def open_study(folder: Path, search: SearchSpace | None = None) -> Study:
    """The study of a sweep's folder; it is created if `search` is given.

    Raises:
        UserError: there is none, or it has begun with another search space.
    """
    package, path = optuna(), folder / STUDY
    if search is None and not path.is_file():
        raise UserError(f"{path} is missing, so {folder} is no sweep")
    if not path.is_file() and has_begun(folder):
        raise UserError(f"{folder} has trials, but {path} is missing; move the folder away")
    storage = package.storages.RDBStorage(
        f"sqlite:///{path.resolve()}", engine_kwargs={"connect_args": {"timeout": 120}}
    )
    if search is None:
        return package.load_study(study_name=NAME, storage=storage)
    study = package.create_study(
        study_name=NAME, storage=storage, direction=search.direction, load_if_exists=True, sampler=_sampler(search)
    )
    before = search_space_of(study, folder)
    if before is not None and before.identity != search.identity:
        if has_begun(folder):
            raise UserError(
                f"{folder} was begun with another space than {search.path} now says; give that one a `name:` of its own"
            )
        package.delete_study(study_name=NAME, storage=storage)
        return open_study(folder, search)
    study.set_user_attr(SPACE, json.dumps(search.content))
    return study


def search_space_of(study: Study, folder: Path) -> SearchSpace | None:
    """The search space that a study was begun with; None if it has none yet."""
    text = study.user_attrs.get(SPACE)
    return None if text is None else SearchSpace(folder / STUDY, json.loads(text))


def has_begun(folder: Path) -> bool:
    """Whether any trial has begun to train."""
    return any(folder.glob(f"trial-*/{rundir.CONFIG}"))


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03}"


def _sampler(search: SearchSpace) -> BaseSampler:
    """A sampler that draws each value by itself."""
    package = optuna()

    class Sampler(package.samplers.BaseSampler):  # type: ignore[name-defined]
        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: Any) -> Any:
            if search.sampler == "grid":
                return search.grid[trial.number][[axis.name for axis in search.axes].index(name)]
            return search.make_sampler(trial.number, name).sample_independent(study, trial, name, distribution)

    return Sampler()


def values_of(study: Study, search: SearchSpace, number: int) -> dict[str, Any]:
    """The values of a trial, drawn now unless a process before this one has drawn them."""
    trial = trial_of(study, number)
    return {axis.name: axis.suggest(trial) for axis in search.axes}


def trial_of(study: Study, number: int) -> Trial:
    """A trial that some process has begun, to go on with."""
    return optuna().trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


def is_pruned(study: Study, pruner: BasePruner, number: int) -> bool:
    """Whether the pruner stops a trial after its last report.

    All reports are repeated in memory, this trial's last. So the answer depends on them alone, and a kill between
    a report and its answer changes nothing. Validations count from 0, whatever their steps.
    """
    copied = optuna().create_study(study_name=NAME, direction=study.direction, pruner=pruner)
    trials = study.get_trials(deepcopy=False)
    copies, answer = [copied.ask() for _ in trials], False
    for trial in sorted(trials, key=lambda trial: (trial.number == number, trial.number)):
        copy = copies[trial.number]
        for place, (_, value) in enumerate(sorted(trial.intermediate_values.items())):
            copy.report(value, place)
            answer = copy.should_prune()
        if trial.state.is_finished():
            copied.tell(copy, trial.value if trial.state.name == "COMPLETE" else None, trial.state)
    return answer


def state(name: str) -> Any:
    return optuna().trial.TrialState[name]

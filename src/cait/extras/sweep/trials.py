"""The trials of a sweep in Optuna's study: which of them stop early, and their results."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import disk
from cait.errors import UserError, one_line
from cait.extras.sweep.space import Space, optuna
from cait.run import curves, rundir
from cait.settings import as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

STUDY = "study.db"
NAME = "sweep"
"""Name of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE, CAUSE, SECONDS, STOPPED = "space", "cause", "seconds", "stopped"
"""Attributes: the study's space; why a trial failed, how long it took, after which step it was stopped."""


def open_study(folder: Path, space: Space | None = None) -> Study:
    """The study of a sweep's folder; it is created if `space` is given.

    Raises:
        UserError: there is none, or it has begun with another space.
    """
    package, path = optuna(), folder / STUDY
    if space is None and not path.is_file():
        raise UserError(f"{path} is missing, so {folder} is no sweep")
    if not path.is_file() and begun(folder):
        raise UserError(f"{folder} has trials, but {path} is missing; move the folder away")
    storage = package.storages.RDBStorage(
        f"sqlite:///{path.resolve()}", engine_kwargs={"connect_args": {"timeout": 120}}
    )
    if space is None:
        return package.load_study(study_name=NAME, storage=storage)
    study = package.create_study(
        study_name=NAME, storage=storage, direction=space.direction, load_if_exists=True, sampler=_sampler(space)
    )
    before = space_of(study, folder)
    if before is not None and before.identity != space.identity:
        if begun(folder):
            raise UserError(
                f"{folder} was begun with another space than {space.path} now says; give that one a `name:` of its own"
            )
        package.delete_study(study_name=NAME, storage=storage)
        return open_study(folder, space)
    study.set_user_attr(SPACE, json.dumps(space.content))
    return study


def space_of(study: Study, folder: Path) -> Space | None:
    """The space that a study was begun with; None if it has none yet."""
    text = study.user_attrs.get(SPACE)
    return None if text is None else Space(folder / STUDY, json.loads(text))


def begun(folder: Path) -> bool:
    """Whether any trial has begun to train."""
    return any(folder.glob(f"trial-*/{rundir.CONFIG}"))


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03}"


def _sampler(space: Space) -> BaseSampler:
    """Chooses each value by itself."""
    package = optuna()

    class Sampler(package.samplers.BaseSampler):  # type: ignore[name-defined]
        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: Any) -> Any:
            if space.sampler == "grid":
                return space.grid[trial.number][[axis.name for axis in space.axes].index(name)]
            return space.make_sampler(trial.number, name).sample_independent(study, trial, name, distribution)

    return Sampler()


def values_of(study: Study, space: Space, number: int) -> dict[str, Any]:
    """The values of a trial, drawn now unless a process before this one has drawn them."""
    trial = trial_of(study, number)
    return {axis.name: axis.suggest(trial) for axis in space.axes}


def trial_of(study: Study, number: int) -> Trial:
    """A trial that some process has begun, to go on with."""
    return optuna().trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


def stops(study: Study, pruner: BasePruner, number: int) -> bool:
    """Whether the pruner stops a trial after its last report.

    All reports are replayed in memory, this trial's last. So the answer depends on them alone, and a kill between
    a report and its answer changes nothing. Validations count from 0, whatever their steps.
    """
    replay = optuna().create_study(study_name=NAME, direction=study.direction, pruner=pruner)
    trials = study.get_trials(deepcopy=False)
    copies, answer = [replay.ask() for _ in trials], False
    for trial in sorted(trials, key=lambda trial: (trial.number == number, trial.number)):
        copy = copies[trial.number]
        for place, (_, value) in enumerate(sorted(trial.intermediate_values.items())):
            copy.report(value, place)
            answer = copy.should_prune()
        if trial.state.is_finished():
            replay.tell(copy, trial.value if trial.state.name == "COMPLETE" else None, trial.state)
    return answer


def state(name: str) -> Any:
    return optuna().trial.TrialState[name]


def best_of(folder: Path, space: Space) -> float | None:
    """The best value of the metric that a run has logged, that of best.ckpt; None if it has logged none."""
    try:
        _, values = curves.read(folder).get(space.metric, ([], []))
    except UserError:
        return None
    return {"max": max, "min": min}[space.mode](values, default=None)


def cause_of(output: Path, status: int) -> str:
    """Why a process failed: the last line that it printed, or the signal that killed it."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("cait: error: ") if lines else f"exit status {status}"


@dataclass(frozen=True)
class Row:
    """One trial."""

    number: int
    state: str
    """complete, pruned, running or failed"""
    value: float | None
    epochs: str
    seconds: float | None
    folder: Path
    values: dict[str, Any]
    cause: str | None


def rows(study: Study, space: Space, folder: Path) -> list[Row]:
    """The trials, best first; then those stopped early, running and failed."""
    found = [_row(trial, space, trial_folder(folder, trial.number)) for trial in study.get_trials(deepcopy=False)]
    order = ("complete", "pruned", "running", "failed")
    sign = -1 if space.mode == "max" else 1
    return sorted(
        found, key=lambda row: (order.index(row.state), sign * row.value if row.value is not None else math.inf)
    )


def _row(trial: FrozenTrial, space: Space, folder: Path) -> Row:
    state = {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
    value = trial.value if state == "complete" else best_of(folder, space)
    attributes = trial.user_attrs
    values = {axis.name: trial.params.get(axis.name) for axis in space.axes}
    return Row(
        trial.number, state, value, _epochs(folder), attributes.get(SECONDS), folder, values, attributes.get(CAUSE)
    )


def _epochs(folder: Path) -> str:
    try:
        return f"{max(curves.read(folder)['epoch'][1]) + 1:.0f}"
    except (UserError, KeyError):
        return "-"


def labels(space: Space) -> list[str]:
    """The names of the axes, as short as they stay distinct."""
    last = [axis.name.split(".")[-1] for axis in space.axes]
    return [axis.name if last.count(name) > 1 else name for axis, name in zip(space.axes, last, strict=True)]


def short(value: Any) -> str:
    """A value as text, rounded for display."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def write_csv(found: list[Row], space: Space, path: Path) -> None:
    """Write the table, with all digits."""
    header = ("trial", "state", space.metric, "epochs", "seconds", "run", *(axis.name for axis in space.axes), "cause")
    disk.write_csv(
        path,
        header,
        (
            (row.number, row.state, row.value, row.epochs, row.seconds, row.folder, *row.values.values(), row.cause)
            for row in found
        ),
    )


def figures(study: Study, space: Space) -> dict[str, Figure | str]:
    """Figures by name: history, importance, parallel; or why there is none."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawing, seed = optuna().visualization.matplotlib, optuna().importance.FanovaImportanceEvaluator(seed=space.seed)
    wanted: dict[str, Callable[[], Any]] = {
        "history": lambda: drawing.plot_optimization_history(study, target_name=space.metric),
        "importance": lambda: drawing.plot_param_importances(study, evaluator=seed, target_name=space.metric),
        "parallel": lambda: drawing.plot_parallel_coordinate(study, target_name=space.metric),
    }
    drawn: dict[str, Figure | str] = {}
    for name, draw in wanted.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # of axes on which all trials have one value
                figure = draw().figure
            figure.set_size_inches(10, 5)
            drawn[name] = figure
        except (ValueError, RuntimeError, ImportError) as error:
            drawn[name] = one_line(error)
    return drawn

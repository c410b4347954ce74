"""A sweep: the space of SPACE.yaml, its trials in Optuna's study, which of them stop early, and what came of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cait import run
from cait.analysis import curves
from cait.analysis.settings import Settings, as_text, flatten
from cait.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

STUDY = "study.db"
NAME = "sweep"
"""Of the study in its database. Hyperband chooses the bracket of a trial by it."""
SPACE, CAUSE, SECONDS, STOPPED = "space", "cause", "seconds", "stopped"
"""Attributes: of the study its space; of a trial why it failed, how long it took, after which step it was stopped."""

VARIABLE = "CAIT_TRIAL"
"""Set by the sweep for the process of a trial whose metric is to be reported: the trial's number."""

KEYS = ("name", "config", "settings", "space", "sampler", "pruner", "trials", "metric", "direction", "seed")
RANGE = ("low", "high", "log", "step")
SAMPLERS = {"tpe": ("n_startup_trials", "n_ei_candidates"), "random": (), "grid": ()}
PRUNERS = {
    "none": (),
    "median": ("n_startup_trials", "n_warmup_steps", "interval_steps"),
    "hyperband": ("min_resource", "max_resource", "reduction_factor"),
}
MODES = {"maximize": "max", "minimize": "min"}
OF_THE_SWEEP = ("run_name", "ckpt_path", "config", "best_metric", "best_mode", "trainer.default_root_dir")
"""Settings that each trial gets from the sweep."""
MOST = 10_000
"""Points of the largest grid."""


def optuna() -> Any:
    """The package, without its notes on each trial.

    Raises:
        UserError: it is not installed.
    """
    try:
        import optuna as package
    except ImportError as error:
        raise UserError('a sweep needs Optuna: pip install ".[sweep]"') from error
    package.logging.set_verbosity(package.logging.ERROR)
    warnings.filterwarnings("ignore", category=package.exceptions.ExperimentalWarning)
    return package


@dataclass(frozen=True)
class Axis:
    """One setting that the trials differ in: choices as the command line takes them, or a range of numbers."""

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    """Of a range of whole numbers never None."""

    def suggest(self, trial: Trial) -> Any:
        """The value of a trial, drawn if it has none yet."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int):
            return trial.suggest_int(self.name, self.low, self.high, step=self.step, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    def points(self) -> list[Any]:
        """All values; of a range without steps its two ends."""
        if self.choices:
            return list(self.choices)
        if self.step is None or self.log:
            return [self.low, self.high]
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self.low + place * self.step for place in range(count)]

    @property
    def ends(self) -> list[Any]:
        """What is worth a try before the sweep: every choice, or the ends of the range."""
        return list(self.choices) or [self.low, self.high]


class Space:
    """What SPACE.yaml says.

    Args:
        path: the file, which errors name.
        content: of the file.

    Raises:
        UserError: it has a key or a value that there is not; the error names them.
    """

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        if not isinstance(content, dict):
            raise UserError(f"{path} is no space of a sweep; it has the keys {', '.join(KEYS)}")
        self._known("", content, KEYS)
        self.name = self._text(content, "name", f"sweep-{path.stem}")
        configs = content.get("config", [])
        self.configs = [configs] if isinstance(configs, str) else self._of("config", configs, list)
        self.settings: Settings = flatten(self._of("settings", content.get("settings") or {}, dict))
        axes = self._of("space", content.get("space"), dict)
        self.axes = [self._axis(str(name), about) for name, about in axes.items()]
        if not self.axes:
            raise UserError(f"{path}: space is empty; it maps settings to their values, as model.lr: [1e-3, 2e-3]")
        self._check_names()
        self.sampler, self._sampler_options = self._kind(content, "sampler", "tpe", SAMPLERS)
        self.pruner, self._pruner_options = self._kind(content, "pruner", "none", PRUNERS)
        self.metric = self._text(content, "metric", "val/acc1")
        self.direction = self._one_of("direction", content.get("direction", "maximize"), MODES)
        self.seed = self._whole("seed", content.get("seed", 0), 0)
        default = len(self.grid) if self.sampler == "grid" else None
        self.trials = self._whole("trials", content.get("trials", default), 1)
        if self.sampler == "grid":
            self.trials = min(self.trials, len(self.grid))
        self.content = content

    @classmethod
    def read(cls, path: Path) -> Space:
        """The space in a file. UserError if it cannot be read."""
        try:
            return cls(path, yaml.safe_load(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path} is no YAML: {one_line(error)}") from error

    @property
    def mode(self) -> str:
        """ "max" or "min" """
        return MODES[self.direction]

    @property
    def identity(self) -> Settings:
        """All that the trials follow from. Only the number of trials may change while a sweep goes on."""
        return {key: value for key, value in self.content.items() if key not in ("trials", "name")}

    @cached_property
    def grid(self) -> list[tuple[Any, ...]]:
        """The points of the grid, in the order of their trials."""
        for axis in self.axes:
            if not axis.choices and (axis.step is None or axis.log):
                raise UserError(
                    f"{self.path}: space.{axis.name} is a range without steps, which no grid can fill; list its values"
                )
        if math.prod(len(axis.points()) for axis in self.axes) > MOST:
            raise UserError(f"{self.path}: the grid has more than {MOST} points; `sampler: random` takes some of them")
        return list(itertools.product(*(axis.points() for axis in self.axes)))

    def make_sampler(self, number: int, name: str) -> BaseSampler:
        """The sampler of one value.

        It is seeded by the trial and the setting, so a sweep that was killed amid a trial's values goes on to the
        values that it would have had.
        """
        samplers = optuna().samplers
        text = f"{self.seed} {number} {name}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest())
        if self.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, multivariate=False, constant_liar=True, **self._sampler_options)

    def make_pruner(self) -> BasePruner | None:
        pruners = optuna().pruners
        kinds = {"median": pruners.MedianPruner, "hyperband": pruners.HyperbandPruner}
        return kinds[self.pruner](**self._pruner_options) if self.pruner in kinds else None

    def arguments(self, values: dict[str, Any]) -> list[str]:
        """The settings of a trial, for `cait fit`."""
        configs = [f"--config={path}" for path in self.configs]
        chosen = [f"--{name}={as_text(value)}" for name, value in (self.settings | values).items()]
        return [*configs, *chosen, f"--best_metric={self.metric}", f"--best_mode={self.mode}"]

    def tries(self) -> list[tuple[str, Any, list[str]]]:
        """(setting, value, arguments): each choice and each end of a range once, beside the first of the others."""
        first = {axis.name: axis.ends[0] for axis in self.axes}
        return [
            (axis.name, value, self.arguments(first | {axis.name: value})) for axis in self.axes for value in axis.ends
        ]

    def _axis(self, name: str, about: Any) -> Axis:
        where = f"space.{name}"
        if isinstance(about, list):
            choices = tuple(as_text(value) for value in about)
            if len(set(choices)) < len(choices) or not choices:
                raise UserError(f"{self.path}: {where} must list values, each once, got {as_text(about)}")
            return Axis(name, choices)
        if not isinstance(about, dict):
            raise UserError(f"{self.path}: {where} must be a list or {{low: A, high: B}}, got {as_text(about)}")
        self._known(f"{where}.", about, RANGE)
        low, high = (self._number(f"{where}.{end}", about.get(end)) for end in ("low", "high"))
        log, step = self._of(f"{where}.log", about.get("log", False), bool), about.get("step")
        step = None if step is None else self._number(f"{where}.step", step)
        if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
            step = 1 if step is None else step
        else:
            low, high = float(low), float(high)
        if log and (about.get("step") is not None or low <= 0):
            raise UserError(f"{self.path}: {where} with log: true needs low above 0 and no step, got {as_text(about)}")
        if not low < high or (step is not None and step <= 0):
            raise UserError(f"{self.path}: {where} needs low below high and a step above 0, got {as_text(about)}")
        return Axis(name, (), low, high, log, step)

    def _check_names(self) -> None:
        for axis in self.axes:
            if axis.name in self.settings:
                raise UserError(f"{self.path}: {axis.name} stands in settings and in space; keep one")
        for name in (*self.settings, *(axis.name for axis in self.axes)):
            if name in OF_THE_SWEEP:
                raise UserError(f"{self.path}: {name} is given by the sweep to each trial; leave it out")

    def _kind(self, content: dict[str, Any], key: str, default: str, known: dict[str, Any]) -> tuple[str, Settings]:
        given = content.get(key) or default
        if not isinstance(given, dict):
            return self._one_of(key, given, known), {}
        options = dict(given)
        name = self._one_of(f"{key}.name", options.pop("name", None), known)
        self._known(f"{key}.", options, known[name])
        return name, {option: self._whole(f"{key}.{option}", value, 0) for option, value in options.items()}

    def _known(self, where: str, content: dict[Any, Any], known: Sequence[str]) -> None:
        for key, value in content.items():
            if key not in known:
                hint = did_you_mean(str(key), known, f"; there are {', '.join(known) or 'no options'}")
                raise UserError(f"{self.path}: unknown key {where}{key}: {as_text(value)}{hint}")

    def _one_of(self, key: str, value: Any, known: dict[str, Any]) -> str:
        if value not in known:
            hint = did_you_mean(str(value), known, f"; there are {', '.join(known)}")
            raise UserError(f"{self.path}: {key} cannot be {as_text(value)}{hint}")
        return value

    def _of(self, key: str, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            said = {dict: "map settings to values", list: "be a file or a list of files", bool: "be true or false"}
            raise UserError(f"{self.path}: {key} must {said[kind]}, got {as_text(value)}")
        return value

    def _text(self, content: dict[str, Any], key: str, default: str) -> str:
        value = content.get(key, default)
        if not isinstance(value, str) or not value or (key == "name" and (Path(value).name != value or value == "..")):
            raise UserError(f"{self.path}: {key} must be a name, got {as_text(value)}")
        return value

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{self.path}: {key} must be a whole number, at least {least}, got {as_text(value)}")
        return value

    def _number(self, key: str, value: Any) -> int | float:
        number = value
        if isinstance(value, str):  # to YAML, 1e-3 is text
            with contextlib.suppress(ValueError):
                number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UserError(f"{self.path}: {key} must be a number, got {as_text(value)}")
        return number


def open_study(folder: Path, space: Space | None = None) -> Study:
    """The study of a sweep's folder; it is made if there is a space to make it of.

    Raises:
        UserError: there is none, or it is of another space and has begun.
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
    return any(folder.glob(f"trial-*/{run.CONFIG}"))


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
    """Whether the pruner stops a trial after what it has reported last.

    All reports are replayed in memory, this trial's last. So the answer follows from them alone, and a kill between
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
    """The best value of the metric that a run has logged, which best.ckpt has too; None if it has logged none."""
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
    """The trials, best first; then those that were stopped early, that run, that failed."""
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
    """The names of the axes, as short as they can be told apart."""
    last = [axis.name.split(".")[-1] for axis in space.axes]
    return [axis.name if last.count(name) > 1 else name for axis, name in zip(space.axes, last, strict=True)]


def short(value: Any) -> str:
    """A value for the eye."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def write_csv(found: list[Row], space: Space, path: Path) -> None:
    """Write the table, with all digits."""
    header = ("trial", "state", space.metric, "epochs", "seconds", "run", *(axis.name for axis in space.axes), "cause")
    run.write_csv(
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

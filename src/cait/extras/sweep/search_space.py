"""What SPACE.yaml says: the settings that a sweep tries, and the samplers and pruners that choose among them."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cait.errors import UserError, did_you_mean, one_line
from cait.settings import Settings, as_text, flatten

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

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
"""The most points that a grid may have."""


def optuna() -> Any:
    """The package Optuna, without its messages about each trial.

    Raises:
        UserError: it is not installed.
    """
    try:
        import optuna as package
    except ImportError as error:
        raise UserError("a sweep needs Optuna: .venv/bin/pip install --editable '.[sweep]'") from error
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
    """Never None for a range of whole numbers."""

    def suggest(self, trial: Trial) -> Any:
        """The value of a trial, drawn if it has none yet."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int):
            return trial.suggest_int(self.name, self.low, self.high, step=self.step, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    def points(self) -> list[Any]:
        """All values; for a range without steps, its two ends."""
        if self.choices:
            return list(self.choices)
        if self.step is None or self.log:
            return [self.low, self.high]
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self.low + place * self.step for place in range(count)]

    @property
    def ends(self) -> list[Any]:
        """The values to try before the sweep: every choice, or the ends of the range."""
        return list(self.choices) or [self.low, self.high]


class SearchSpace:
    """The settings that the trials of a sweep differ in, those that they share, and how the trials are chosen.

    Args:
        path: the file, which errors name.
        content: the file's content.

    Raises:
        UserError: it has an unknown key or an invalid value; the error names it.
    """

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        if not isinstance(content, dict):
            raise UserError(f"{path} is no space of a sweep; it has the keys {', '.join(KEYS)}")
        self._check_keys("", content, KEYS)
        self.name = self._text("name", content.get("name", f"sweep-{path.stem}"))
        if Path(self.name).name != self.name or self.name == "..":
            raise self._error("name", "be a name", self.name)
        configs = content.get("config", [])
        self.configs = [configs] if isinstance(configs, str) else self._typed("config", configs, list)
        self.settings: Settings = flatten(self._typed("settings", content.get("settings") or {}, dict))
        axes = self._typed("space", content.get("space"), dict)
        self.axes = [self._axis(str(name), given) for name, given in axes.items()]
        if not self.axes:
            raise UserError(f"{path}: space is empty; it maps settings to their values, as model.lr: [1e-3, 2e-3]")
        self._check_names()
        self.sampler, self._sampler_options = self._choice("sampler", content.get("sampler") or "tpe", SAMPLERS)
        self.pruner, self._pruner_options = self._choice("pruner", content.get("pruner") or "none", PRUNERS)
        self.metric = self._text("metric", content.get("metric", "val/acc1"))
        self.direction = self._one_of("direction", content.get("direction", "maximize"), MODES)
        self.seed = self._whole("seed", content.get("seed", 0), 0)
        default = len(self.grid) if self.sampler == "grid" else None
        self.trials = self._whole("trials", content.get("trials", default), 1)
        if self.sampler == "grid":
            self.trials = min(self.trials, len(self.grid))
        self.content = content

    @classmethod
    def read(cls, path: Path) -> SearchSpace:
        """The search space in a file.

        Raises:
            UserError: the file cannot be read.
        """
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
        """All that determines the trials. Only the number of trials may change while a sweep goes on."""
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

        It is seeded by the trial and the setting, so a sweep that was killed between a trial's values
        goes on with the values that it would have drawn.
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

    def probes(self) -> list[tuple[str, Any, list[str]]]:
        """(setting, value, arguments): each choice and each end of a range once, with the first value of the others."""
        first = {axis.name: axis.ends[0] for axis in self.axes}
        return [
            (axis.name, value, self.arguments(first | {axis.name: value})) for axis in self.axes for value in axis.ends
        ]

    def _axis(self, name: str, given: Any) -> Axis:
        key = f"space.{name}"
        if isinstance(given, list):
            choices = tuple(as_text(value) for value in given)
            if len(set(choices)) < len(choices) or not choices:
                raise self._error(key, "list values, each once", given)
            return Axis(name, choices)
        if not isinstance(given, dict):
            raise self._error(key, "be a list or {low: A, high: B}", given)
        self._check_keys(f"{key}.", given, RANGE)
        low, high = (self._number(f"{key}.{end}", given.get(end)) for end in ("low", "high"))
        log, step = self._typed(f"{key}.log", given.get("log", False), bool), given.get("step")
        step = None if step is None else self._number(f"{key}.step", step)
        if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
            step = 1 if step is None else step
        else:
            low, high = float(low), float(high)
        if log and (given.get("step") is not None or low <= 0):
            raise UserError(f"{self.path}: {key} with log: true needs low above 0 and no step, got {as_text(given)}")
        if not low < high or (step is not None and step <= 0):
            raise UserError(f"{self.path}: {key} needs low below high and a step above 0, got {as_text(given)}")
        return Axis(name, (), low, high, log, step)

    def _check_names(self) -> None:
        for axis in self.axes:
            if axis.name in self.settings:
                raise UserError(f"{self.path}: {axis.name} stands in settings and in space; keep one")
        for name in (*self.settings, *(axis.name for axis in self.axes)):
            if name in OF_THE_SWEEP:
                raise UserError(f"{self.path}: {name} is given by the sweep to each trial; leave it out")

    def _choice(self, key: str, given: Any, known: dict[str, Any]) -> tuple[str, Settings]:
        """The name and the options of a sampler or a pruner."""
        if not isinstance(given, dict):
            return self._one_of(key, given, known), {}
        options = dict(given)
        name = self._one_of(f"{key}.name", options.pop("name", None), known)
        self._check_keys(f"{key}.", options, known[name])
        return name, {option: self._whole(f"{key}.{option}", value, 0) for option, value in options.items()}

    def _check_keys(self, prefix: str, given: dict[Any, Any], known: Sequence[str]) -> None:
        for key, value in given.items():
            if key not in known:
                hint = did_you_mean(str(key), known, f"; there are {', '.join(known) or 'no options'}")
                raise UserError(f"{self.path}: unknown key {prefix}{key}: {as_text(value)}{hint}")

    def _one_of(self, key: str, value: Any, known: dict[str, Any]) -> str:
        if value not in known:
            hint = did_you_mean(str(value), known, f"; there are {', '.join(known)}")
            raise UserError(f"{self.path}: {key} cannot be {as_text(value)}{hint}")
        return value

    def _typed(self, key: str, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            rules = {dict: "map settings to values", list: "be a file or a list of files", bool: "be true or false"}
            raise self._error(key, rules[kind], value)
        return value

    def _text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self._error(key, "be a name", value)
        return value

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._error(key, f"be a whole number, at least {least}", value)
        return value

    def _number(self, key: str, value: Any) -> int | float:
        number = value
        if isinstance(value, str):  # to YAML, 1e-3 is text
            with contextlib.suppress(ValueError):
                number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise self._error(key, "be a number", value)
        return number

    def _error(self, key: str, rule: str, value: Any) -> UserError:
        return UserError(f"{self.path}: {key} must {rule}, got {as_text(value)}")

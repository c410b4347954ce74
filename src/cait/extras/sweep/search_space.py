"""What SPACE.yaml says: the settings that a sweep tries, and how it chooses among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna import Trial
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler

from cait.errors import UserError, did_you_mean, one_line
from cait.guards import configurations
from cait.settings import Settings, as_text, flatten

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of a setting: choices as the command line takes them, or a range of numbers."""
SAMPLERS: dict[str, Any] = {"tpe": TPESampler, "random": RandomSampler, "grid": RandomSampler}
PRUNERS: dict[str, Any] = {"none": NopPruner, "median": MedianPruner, "hyperband": HyperbandPruner}
MODES = {"maximize": "max", "minimize": "min"}
DEFAULTS: Settings = {
    "config": [],
    "settings": {},
    "space": {},
    "sampler": "tpe",
    "pruner": "none",
    "trials": None,
    "metric": "val/acc1",
    "seed": 0,
}
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("be a name", lambda value: isinstance(value, str) and Path(value).name == value != ".."),
    "config": ("be a file or a list of files", lambda value: isinstance(value, str | list)),
    "settings": ("map settings to values", lambda value: isinstance(value, dict)),
    "space": ("map settings to values", lambda value: isinstance(value, dict) and bool(value)),
    "sampler": (f"be one of {', '.join(SAMPLERS)}", lambda value: _name_of(value) in SAMPLERS),
    "pruner": (f"be one of {', '.join(PRUNERS)}", lambda value: _name_of(value) in PRUNERS),
    "trials": ("be a whole number, at least 1", lambda value: type(value) is int and value > 0),
    "metric": ("be a name", lambda value: isinstance(value, str)),
    "direction": (f"be one of {', '.join(MODES)}", lambda value: value in MODES),
    "seed": ("be a whole number, at least 0", lambda value: type(value) is int and value >= 0),
}
"""The keys, what each must be, and whether a value is so."""
MOST = 10_000
"""Points of a grid."""
OF_THE_SWEEP = ("run_name", "ckpt_path", "config", "best_metric", "best_mode", "trainer.default_root_dir")
"""Settings that each trial gets from the sweep."""


class SearchSpace:
    """The settings that the trials of a sweep differ in, those that they share, and how the trials are chosen.

    Args:
        path: the file, which errors name.

    Raises:
        UserError: it cannot be read, has an unknown key or an invalid value; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = DEFAULTS | {"name": f"sweep-{path.stem}"} | self._read()
        self.is_grid = _name_of(self.content["sampler"]) == "grid"
        self._check(self.content | ({"trials": 1} if self.is_grid else {}))
        self.name: str = self.content["name"]
        config = self.content["config"]
        self.configs: list[str] = [config] if isinstance(config, str) else config
        self.settings: Settings = flatten(self.content["settings"])
        self.axes = {str(name): self._axis(str(name), axis) for name, axis in self.content["space"].items()}
        self._check_names()
        wanted: list[int] = [self.content["trials"] or 0, len(self.grid) if self.is_grid else 0]
        self.trials = min(number for number in wanted if number)
        self.metric: str = self.content["metric"]
        self.seed: int = self.content["seed"]
        self.direction: Any = self.content.get("direction") or self._direction()
        self.mode = MODES[self.direction]
        self.pruner: BasePruner = self._made("pruner", PRUNERS, {})
        self.sampler(0)  # refuses options

    def _read(self) -> Settings:
        try:
            content = configurations.settings(self.path)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        return {str(key): value for key, value in content.items() if value is not None}

    def _check(self, content: Settings) -> None:
        for key, value in content.items():
            if key not in RULES:
                raise UserError(f"{self.path}: unknown key {key}{did_you_mean(key, RULES, f', not one of {[*RULES]}')}")
            rule, holds = RULES[key]
            if not holds(value):
                raise UserError(f"{self.path}: {key} must {rule}, got {as_text(value)}")

    def _check_names(self) -> None:
        for name in (*self.settings, *self.axes):
            if name in OF_THE_SWEEP:
                raise UserError(f"{self.path}: {name} is given by the sweep to each trial; leave it out")
            if name in self.settings and name in self.axes:
                raise UserError(f"{self.path}: {name} stands in settings and in space; keep one")

    def _direction(self) -> str:
        from cait.train.metrics import best_mode  # here, because it takes long to import

        mode = best_mode(self.metric, {})
        if mode is None:
            raise UserError(f"{self.path}: is the largest {self.metric} best? Add direction: maximize or minimize")
        return next(direction for direction in MODES if MODES[direction] == mode)

    def _axis(self, name: str, given: Any) -> Axis:
        try:
            if isinstance(given, list):
                return CategoricalDistribution([as_text(value) for value in given])
            # To YAML, 1e-3 is text.
            ends = {end: given[end] if isinstance(given[end], int) else float(given[end]) for end in ("low", "high")}
            is_whole = all(isinstance(value, int) for value in (*ends.values(), given.get("step", 1)))
            return IntDistribution(**given | ends) if is_whole else FloatDistribution(**given | ends)
        except (ValueError, TypeError, KeyError) as error:
            rule = "must be a list, or {low: A, high: B} with log: true or step: N"
            raise UserError(f"{self.path}: space.{name} {rule}, got {as_text(given)}: {one_line(error)}") from error

    @cached_property
    def grid(self) -> list[Settings]:
        """All combinations of values. From one to the next the last setting changes fastest."""
        for name, axis in self.axes.items():
            if not isinstance(axis, CategoricalDistribution):
                raise UserError(f"{self.path}: space.{name} is a range; a grid needs a list of values")
        values = [axis.choices for axis in self.axes.values() if isinstance(axis, CategoricalDistribution)]
        if (points := math.prod(map(len, values))) > MOST:
            raise UserError(f"{self.path}: the grid has {points:,} points; `sampler: random` takes some of them")
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*values)]

    def sampler(self, place: int) -> BaseSampler:
        """The sampler of one trial, seeded by its place in the sweep: so a sweep that was killed draws the same."""
        own = {} if _name_of(self.content["sampler"]) != "tpe" else {"constant_liar": True}
        sampler = self._made("sampler", SAMPLERS, own | {"seed": self.seed * MOST + place})
        return PartialFixedSampler(self.grid[place], sampler) if self.is_grid else sampler

    def _made(self, key: str, kinds: dict[str, Any], own: Settings) -> Any:
        """Optuna's sampler or pruner with the options in the file."""
        given = self.content[key]
        options = {name: value for name, value in given.items() if name != "name"} if isinstance(given, dict) else {}
        for option, value in options.items():
            if not isinstance(value, int | float):
                raise UserError(f"{self.path}: {key}.{option} must be a number, got {as_text(value)}")
        try:
            return kinds[_name_of(given)](**own | options)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: {key}: {one_line(error)}") from error

    def draw(self, trial: Trial) -> Settings:
        """The values of a trial, by the study's sampler."""
        return {name: _suggest(trial, name, axis) for name, axis in self.axes.items()}

    def arguments(self, values: Settings) -> list[str]:
        """The settings of a trial, for `cait fit`."""
        configs = [f"--config={path}" for path in self.configs]
        chosen = [f"--{name}={as_text(value)}" for name, value in (self.settings | values).items()]
        return [*configs, *chosen, f"--best_metric={self.metric}", f"--best_mode={self.mode}"]

    def probes(self) -> Iterator[tuple[str, Any, list[str]]]:
        """(setting, value, arguments): each choice and each end of a range once, with the first value of the others."""
        ends = {
            name: axis.choices if isinstance(axis, CategoricalDistribution) else (axis.low, axis.high)
            for name, axis in self.axes.items()
        }
        first = {name: values[0] for name, values in ends.items()}
        for name, values in ends.items():
            yield from ((name, value, self.arguments(first | {name: value})) for value in values)


def _name_of(choice: Any) -> str:
    return str(choice.get("name") if isinstance(choice, dict) else choice)


def _suggest(trial: Trial, name: str, axis: Axis) -> Any:
    if isinstance(axis, CategoricalDistribution):
        return trial.suggest_categorical(name, axis.choices)
    suggest = trial.suggest_int if isinstance(axis, IntDistribution) else trial.suggest_float
    return suggest(name, axis.low, axis.high, step=axis.step, log=axis.log)  # type: ignore[arg-type]

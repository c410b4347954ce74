"""What SPACE.yaml says: the settings that a sweep tries, and how it chooses among them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from cait.errors import UserError, did_you_mean
from cait.guards import configurations
from cait.settings import Settings, as_text, flatten

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of a setting: choices as the command line takes them, or a range of numbers."""
DEFAULTS: Settings = {
    "name": None,
    "config": [],
    "settings": {},
    "space": None,
    "sampler": "tpe",
    "pruner": "none",
    "trials": None,
    "metric": "val/acc1",
    "direction": None,
    "seed": 0,
}
RANGE = ("low", "high", "log", "step")
SAMPLERS = {"tpe": ("n_startup_trials", "n_ei_candidates"), "random": (), "grid": ()}
PRUNERS = {
    "none": (),
    "median": ("n_startup_trials", "n_warmup_steps", "interval_steps"),
    "hyperband": ("min_resource", "max_resource", "reduction_factor"),
}
MOST = 10_000
"""Points of a grid that is tried whole."""
MODES = {"maximize": "max", "minimize": "min"}
METRICS = "model.metrics."
"""What the names of the user's own metrics begin with, among settings."""
OF_THE_SWEEP = ("run_name", "ckpt_path", "config", "best_metric", "best_mode", "trainer.default_root_dir")
"""Settings that each trial gets from the sweep."""


class SearchSpace:
    """The settings that the trials of a sweep differ in, those that they share, and how the trials are chosen.

    Args:
        path: the file, which errors name.
        content: the file's content.

    Raises:
        UserError: it has an unknown key or an invalid value; the error names it.
    """

    def __init__(self, path: Path, content: Any) -> None:
        self.path, self.content = path, content
        if not isinstance(content, dict):
            raise UserError(f"{path} is no space of a sweep; it has the keys {', '.join(DEFAULTS)}")
        self._check_keys("", content, DEFAULTS)
        given = DEFAULTS | {key: value for key, value in content.items() if value is not None}
        self.name: str = given["name"] or f"sweep-{path.stem}"
        self._check(Path(str(self.name)).name == self.name != "..", "name", "be a name", self.name)
        self.configs: list[str] = [given["config"]] if isinstance(given["config"], str) else given["config"]
        self._check(isinstance(self.configs, list), "config", "be a file or a list of files", self.configs)
        settings, space = given["settings"], given["space"]
        self._check(isinstance(settings, dict), "settings", "map settings to values", settings)
        self.settings: Settings = flatten(settings)
        self._check(isinstance(space, dict) and bool(space), "space", "map settings to values", space)
        self.axes = {str(name): self._axis(f"space.{name}", axis) for name, axis in space.items()}
        self._check_names()
        self.sampler, self.sampler_options = self._choice("sampler", given["sampler"], SAMPLERS)
        self.pruner, self.pruner_options = self._choice("pruner", given["pruner"], PRUNERS)
        self.metric = given["metric"]
        self._check(isinstance(self.metric, str), "metric", "be a name", self.metric)
        self._direction = given["direction"] and self._one_of("direction", given["direction"], MODES)
        self.seed = self._whole("seed", given["seed"], 0)
        points = math.prod(map(len, self.grid.values())) if self.sampler == "grid" else None
        if points and points > MOST and given["trials"] is None:
            raise UserError(f"{path}: the grid has {points:,} points; `sampler: random` takes some of them")
        wanted = self._whole("trials", points if given["trials"] is None else given["trials"], 1)
        self.trials = min(wanted, points or wanted)

    @classmethod
    def read(cls, path: Path) -> SearchSpace:
        """The search space in a file.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            search = cls(path, configurations.settings(path))
            _ = search.mode  # refuses a metric that does not say it
            return search
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error

    @cached_property
    def mode(self) -> str:
        """ "max" or "min": which value of the metric is the best. UserError if nothing says it."""
        from cait.train.metrics import best_mode  # here, because it takes long to import

        mode = MODES[self._direction] if self._direction else best_mode(self.metric, self._own_metrics())
        if mode is None:
            raise UserError(f"{self.path}: is the largest {self.metric} best? Add direction: maximize or minimize")
        return mode

    @property
    def direction(self) -> Any:
        """As Optuna calls it."""
        return next(direction for direction, mode in MODES.items() if mode == self.mode)

    def _own_metrics(self) -> Settings:
        found: Settings = {}
        for config in map(Path, map(configurations.found, self.configs)):
            found |= flatten(configurations.settings(config)) if config.is_file() else {}  # `fit` refuses it
        found |= self.settings
        return {name.removeprefix(METRICS): path for name, path in found.items() if name.startswith(METRICS)}

    @cached_property
    def grid(self) -> dict[str, list[Any]]:
        """The values of each axis. From one trial to the next the last axis changes fastest."""
        values = {}
        for name, axis in self.axes.items():
            if isinstance(axis, CategoricalDistribution):
                values[name] = list(axis.choices)
                continue
            if axis.step is None or axis.log:
                raise UserError(
                    f"{self.path}: space.{name} is a range without steps, which no grid can fill; list its values"
                )
            count = math.floor((axis.high - axis.low) / axis.step + 1e-9) + 1
            values[name] = [axis.low + place * axis.step for place in range(count)]
        return values

    def point(self, number: int) -> dict[str, Any]:
        """The values of a trial of the grid."""
        places = np.unravel_index(number, [len(values) for values in self.grid.values()])
        return {name: values[place] for (name, values), place in zip(self.grid.items(), places, strict=True)}

    def arguments(self, values: dict[str, Any]) -> list[str]:
        """The settings of a trial, for `cait fit`."""
        configs = [f"--config={path}" for path in self.configs]
        chosen = [f"--{name}={as_text(value)}" for name, value in (self.settings | values).items()]
        return [*configs, *chosen, f"--best_metric={self.metric}", f"--best_mode={self.mode}"]

    def probes(self) -> list[tuple[str, Any, list[str]]]:
        """(setting, value, arguments): each choice and each end of a range once, with the first value of the others."""
        ends = {
            name: axis.choices if isinstance(axis, CategoricalDistribution) else (axis.low, axis.high)
            for name, axis in self.axes.items()
        }
        first = {name: values[0] for name, values in ends.items()}
        return [
            (name, value, self.arguments(first | {name: value})) for name, values in ends.items() for value in values
        ]

    def _axis(self, key: str, given: Any) -> Axis:
        if isinstance(given, list):
            choices = [as_text(value) for value in given]
            self._check(0 < len(choices) == len(set(choices)), key, "list values, each once", given)
            return CategoricalDistribution(choices)
        self._check(isinstance(given, dict), key, "be a list or {low: A, high: B}", given)
        self._check_keys(f"{key}.", given, RANGE)
        low, high = (self._number(f"{key}.{end}", given.get(end)) for end in ("low", "high"))
        log = given.get("log", False)
        self._check(isinstance(log, bool), f"{key}.log", "be true or false", log)
        step = self._number(f"{key}.step", given["step"]) if given.get("step") is not None else None
        try:
            if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
                return IntDistribution(low, high, log, 1 if step is None else step)
            return FloatDistribution(low, high, log, step)
        except ValueError as error:
            raise UserError(
                f"{self.path}: {key} needs low below high and a step above 0; "
                f"a range with log: true needs low above 0 and no step; got {as_text(given)}"
            ) from error

    def _check_names(self) -> None:
        for name in (*self.settings, *self.axes):
            if name in OF_THE_SWEEP:
                raise UserError(f"{self.path}: {name} is given by the sweep to each trial; leave it out")
            if name in self.settings and name in self.axes:
                raise UserError(f"{self.path}: {name} stands in settings and in space; keep one")

    def _choice(self, key: str, given: Any, known: dict[str, Any]) -> tuple[str, Settings]:
        """The name and the options of a sampler or a pruner."""
        if not isinstance(given, dict):
            return self._one_of(key, given, known), {}
        options = dict(given)
        name = self._one_of(f"{key}.name", options.pop("name", None), known)
        self._check_keys(f"{key}.", options, known[name])
        return name, {option: self._whole(f"{key}.{option}", value, 0) for option, value in options.items()}

    def _check_keys(self, prefix: str, given: dict[Any, Any], known: Iterable[str]) -> None:
        for key, value in given.items():
            if key not in known:
                hint = did_you_mean(str(key), known, f"; there are {', '.join(known) or 'no options'}")
                raise UserError(f"{self.path}: unknown key {prefix}{key}: {as_text(value)}{hint}")

    def _one_of(self, key: str, value: Any, known: dict[str, Any]) -> str:
        if value not in known:
            hint = did_you_mean(str(value), known, f"; there are {', '.join(known)}")
            raise UserError(f"{self.path}: {key} cannot be {as_text(value)}{hint}")
        return value

    def _whole(self, key: str, value: Any, least: int) -> int:
        self._check(type(value) is int and value >= least, key, f"be a whole number, at least {least}", value)
        return value

    def _number(self, key: str, value: Any) -> Any:
        """An int or a float."""
        number = math.nan
        with contextlib.suppress(TypeError, ValueError):
            number = value if isinstance(value, int) else float(value)  # to YAML, 1e-3 is text
        self._check(math.isfinite(number), key, "be a number", value)
        return number

    def _check(self, holds: bool, key: str, rule: str, value: Any) -> None:
        if not holds:
            raise UserError(f"{self.path}: {key} must {rule}, got {as_text(value)}")

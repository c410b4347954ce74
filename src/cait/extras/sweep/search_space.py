"""What SPACE.yaml says: the settings that a sweep tries, and how it chooses among them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from optuna import Trial
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler

from cait import disk
from cait.errors import UserError, did_you_mean, one_line
from cait.guards import configurations
from cait.settings import Settings, as_text, flatten

Axis = CategoricalDistribution | FloatDistribution | IntDistribution
"""The values of a setting: choices as the command line takes them, or a range of numbers."""
SAMPLERS: dict[str, Any] = {"tpe": TPESampler, "random": RandomSampler, "grid": RandomSampler}
PRUNERS: dict[str, Any] = {"none": NopPruner, "median": MedianPruner, "hyperband": HyperbandPruner}
MODES = {"maximize": "max", "minimize": "min"}
SHAPE = {
    "name?": str,
    "config?": (str, list),
    "settings?": dict,
    "space": dict,
    "sampler?": (str, dict),
    "pruner?": (str, dict),
    "trials?": int,
    "metric?": str,
    "direction?": str,
    "seed?": int,
}
"""The keys, and the types of their values."""
SEEDS = 10_000
"""Trials of a sweep that differ in their seeds from those of the next `seed`."""


class SearchSpace:
    """The settings that the trials of a sweep differ in, those that they share, and how the trials are chosen.

    Args:
        path: the file, which errors name.

    Raises:
        UserError: it cannot be read, has an unknown key or an invalid value; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = content = self._read()
        self.name = Path(content.get("name", f"sweep-{path.stem}")).name
        config = content.get("config", [])
        self.configs: list[str] = [config] if isinstance(config, str) else config
        self.settings: Settings = flatten(content.get("settings", {}))
        self.axes = {str(name): self._axis(str(name), axis) for name, axis in content["space"].items()}
        self.metric: str = content.get("metric", "val/acc1")
        self.direction = self._direction()
        self.mode = MODES[self.direction]
        self.pruner: BasePruner = self._made("pruner", PRUNERS, "none", {})
        self.is_grid = _name_of(content.get("sampler", "tpe")) == "grid"
        self.grid = self._points() if self.is_grid else []
        self.trials: int = content.get("trials", len(self.grid))
        if self.is_grid:
            self.trials = min(self.trials, len(self.grid))
        if self.trials < 1:
            raise UserError(f"{path}: trials must be at least 1")
        self.sampler(0)  # refuses options

    def _read(self) -> Settings:
        try:
            content = configurations.settings(self.path)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        known = [key.rstrip("?") for key in SHAPE]
        for key in content:
            if key not in known:
                raise UserError(
                    f"{self.path}: unknown key {key}{did_you_mean(str(key), known, f', not one of {known}')}"
                )
        disk.check_shape(content, SHAPE, self.path)
        return {key: value for key, value in content.items() if value is not None}

    def _direction(self) -> Any:
        from cait.train.metrics import best_mode  # here, because it takes long to import

        mode = best_mode(self.metric, {})
        given = self.content.get("direction") or {"max": "maximize", "min": "minimize"}.get(mode or "")
        if given not in MODES:
            raise UserError(f"{self.path}: is the largest {self.metric} best? Add direction: maximize or minimize")
        return given

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

    def _points(self) -> list[Settings]:
        """All combinations of values. From one to the next the last setting changes fastest."""
        choices = []
        for name, axis in self.axes.items():
            if not isinstance(axis, CategoricalDistribution):
                raise UserError(f"{self.path}: space.{name} is a range; a grid needs a list of values")
            choices.append(axis.choices)
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*choices)]

    def sampler(self, place: int) -> BaseSampler:
        """The sampler of one trial, seeded by its place in the sweep: so a sweep that was killed draws the same."""
        options: Settings = {"seed": self.content.get("seed", 0) * SEEDS + place}
        if _name_of(self.content.get("sampler", "tpe")) == "tpe":
            options["constant_liar"] = True  # trials that run at the same time differ
        sampler = self._made("sampler", SAMPLERS, "tpe", options)
        return PartialFixedSampler(self.grid[place], sampler) if self.is_grid else sampler

    def _made(self, key: str, kinds: dict[str, Any], default: str, options: Settings) -> Any:
        """Optuna's sampler or pruner with the options in the file."""
        given = self.content.get(key, default)
        name = _name_of(given)
        if name not in kinds:
            raise UserError(f"{self.path}: {key} must be one of {', '.join(kinds)}, got {name}")
        if isinstance(given, dict):
            options = options | {option: value for option, value in given.items() if option != "name"}
        try:
            return kinds[name](**options)
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


def _suggest(trial: Trial, name: str, axis: Axis) -> Any:
    if isinstance(axis, CategoricalDistribution):
        return trial.suggest_categorical(name, axis.choices)
    if isinstance(axis, IntDistribution):
        return trial.suggest_int(name, axis.low, axis.high, step=axis.step, log=axis.log)
    return trial.suggest_float(name, axis.low, axis.high, step=axis.step, log=axis.log)


def _name_of(choice: Any) -> str:
    return str(choice.get("name") if isinstance(choice, dict) else choice)

"""What SPACE.yaml says: the settings that a sweep tries, and how it chooses among them."""

import itertools
from pathlib import Path
from typing import Any

from optuna import create_study
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from cait import disk
from cait.errors import UserError, one_line
from cait.guards import configurations
from cait.settings import Settings, as_text, flatten
from cait.train.metrics import known_mode
from contrib.runner import arguments_of

SAMPLERS = {"tpe": TPESampler, "random": RandomSampler, "grid": RandomSampler}
PRUNERS = {"none": NopPruner, "median": MedianPruner, "hyperband": HyperbandPruner}
SHAPE = {
    "name?": str,
    "config?": (str, list),
    "settings?": dict,
    "space": dict,
    "sampler?": (str, dict),
    "pruner?": (str, dict),
    "metric?": str,
    "trials?": int,
    "seed?": int,
    ...: type(None),  # no other key
}
"""The keys, and the types of their values."""
SEEDS = 10_000
"""Trials of a sweep that differ in their seeds from those of the next `seed`."""


class SearchSpace:
    """The settings that the trials of a sweep differ in, those that they share, and how the trials are chosen.

    Raises UserError if the file cannot be read, has an unknown key or an invalid value; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = configurations.load(configurations.read_text(path), path)
        disk.check_shape(loaded, SHAPE, path)
        self.content = content = {key: value for key, value in loaded.items() if value is not None}
        self.told = {key: value for key, value in content.items() if key not in ("name", "trials")}
        self.name = content.get("name", f"sweep-{path.stem}")
        configurations.check_run_name(self.name)
        config = content.get("config", [])
        self.configs = [config] if isinstance(config, str) else config
        self.settings: Settings = {
            "best_metric": "val/acc1",
            **flatten(content.get("settings", {})),
        }
        if "metric" in content:
            self.settings["best_metric"] = content["metric"]
        disk.check_shape(self.settings, {"best_metric": str}, path, "settings")
        self.axes = {
            str(name): self._axis(name, values) for name, values in content["space"].items()
        }
        self.metric = self.settings["best_metric"]
        mode = self.settings.get("best_mode") or known_mode(self.metric, {})
        self.settings["best_mode"] = mode  # files of `config` may have another
        self.is_max = mode == "max"
        self.pruner = self._made("pruner", PRUNERS, "none")
        self.grid = self._points() if content.get("sampler") in ("grid", {"name": "grid"}) else []
        self.trials = len(self.grid) or content.get("trials", 0)
        if self.trials < 1:
            raise UserError(f"{path}: trials must be at least 1")
        try:
            create_study(sampler=self.sampler(0)).ask(self.axes)
        except (TypeError, OverflowError) as error:  # of options and bounds that Optuna has taken
            raise UserError(f"{path}: no trial can be drawn: {one_line(error)}") from error

    def _axis(self, name: object, given: Any) -> BaseDistribution:
        """The values of a setting: choices as the command line takes them, or a range of numbers."""
        try:
            if isinstance(given, list):
                return CategoricalDistribution([as_text(value) for value in given])
            is_whole = all(
                isinstance(value, int)
                for value in (given["low"], given["high"], given.get("step", 1))
            )
            return IntDistribution(**given) if is_whole else FloatDistribution(**given)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path}: space.{name} must be a list, or {{low: A, high: B}} with log: true or step: N, "
                f"got {as_text(given)}: {one_line(error)}"
            ) from error

    def _points(self) -> list[Settings]:
        """All combinations of values. From one to the next the last setting changes fastest."""
        choices = []
        for name, axis in self.axes.items():
            if not isinstance(axis, CategoricalDistribution):
                raise UserError(
                    f"{self.path}: space.{name} is a range; a grid needs a list of values"
                )
            choices.append(axis.choices)
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*choices)]

    def sampler(self, number: int) -> BaseSampler:
        """The sampler of one trial, seeded by its number: processes that share a sweep draw different trials."""
        return self._made(
            "sampler", SAMPLERS, "tpe", seed=self.content.get("seed", 0) * SEEDS + number
        )

    def _made(self, key: str, kinds: Settings, default: str, **options: Any) -> Any:
        """Optuna's sampler or pruner with the options in the file."""
        choice = self.content.get(key, default)
        chosen = {"name": choice} if isinstance(choice, str) else {"name": default, **choice}
        name = str(chosen.pop("name"))
        if name not in kinds:
            raise UserError(f"{self.path}: {key} must be one of {', '.join(kinds)}, got {name}")
        try:
            return kinds[name](**options, **chosen)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: {key}: {one_line(error)}") from error

    def arguments(self, values: Settings) -> list[str]:
        """The settings of a trial, for `cait fit`."""
        configs = [f"--config={path}" for path in self.configs]
        return [*configs, *arguments_of(self.settings, values)]

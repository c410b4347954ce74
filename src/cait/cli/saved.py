"""The configuration that a run has saved, in today's names."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from cait import plugins
from cait.errors import UserError, one_line
from cait.guards.configurations import check_config
from cait.run import rundir
from cait.settings import Settings, flatten

DEFAULTS = {"exif_orientation": False, "background": None}
"""Settings of the data module that earlier runs did not record, and the values that they used."""
MOVED = {
    "cait.module": "cait.train.module",
    "cait.datamodule": "cait.data.datamodule",
    "cait.losses": "cait.train.losses",
    "cait.metrics": "cait.train.metrics",
    "cait.optim": "cait.train.optim",
    "cait.callbacks.ema": "cait.train.ema",
    "cait.callbacks.seeding": "cait.train.step_seed",
    "cait.callbacks.guard": "cait.guards.nonfinite",
    "cait.callbacks.checkpoints": "cait.run.checkpoints",
    "cait.callbacks.loggers": "cait.run.loggers",
}
"""Modules of earlier versions whose classes a configuration may name, and where these are now; extras add theirs."""


def read(path: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml: class paths as of today, and what earlier runs did not record.

    Raises:
        UserError: it is no configuration.
    """
    check_config(path)
    try:
        config = _renamed(yaml.safe_load(path.read_text(encoding="utf-8")), MOVED | plugins.merged("MOVED"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a configuration: {one_line(error)}") from error
    data = config.get("data")
    if isinstance(data, dict) and "max_bad_share" in data:  # a data module of your own may know none of them
        config["data"] = DEFAULTS | data
    return config


def _renamed(value: Any, moved: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, moved) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, moved) for item in value]
    module, dot, name = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    return f"{moved[module]}{dot}{name}" if module in moved else value


def without_absent(
    config: dict[str, Any], known: Collection[str], strategies: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """(`config` without settings and classes of extras that are not here, names of those left out that were set)

    Args:
        config: as `read` returns it.
        known: every setting and group of settings, as "model" and "model.lr".
        strategies: names that trainer.strategy takes.
    """
    absent = {key: value for key, value in config.items() if key not in known}
    kept = {key: value for key, value in config.items() if key not in absent}
    if isinstance(data := kept.get("data"), dict):  # the other group that extras add settings to
        absent |= {f"data.{key}": value for key, value in data.items() if f"data.{key}" not in known}
        kept["data"] = {key: value for key, value in data.items() if f"data.{key}" in known}
    left_out = [name for name, value in flatten(absent).items() if value not in (None, False, [], {})]
    trainer = kept.get("trainer")
    if not isinstance(trainer, dict):
        return kept, left_out
    present = {name: _present(value) for name, value in trainer.items()}
    if isinstance(strategy := trainer.get("strategy"), str) and "." not in strategy and strategy not in strategies:
        present["strategy"] = None
    left_out += [f"trainer.{name}" for name, value in trainer.items() if present[name] != value]
    kept["trainer"] = {name: value for name, value in present.items() if value is not None or trainer[name] is None}
    return kept, left_out


def _present(value: Any) -> Any:
    """A value of the Trainer without classes of this package that are not here; None if nothing is left."""
    if isinstance(value, list):
        return [item for item in value if _present(item) is not None]
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str) or not path.startswith("cait."):
        return value
    try:
        found = find_spec(path.rpartition(".")[0])
    except ModuleNotFoundError:  # the package that it lies in
        found = None
    return None if found is None else value


def data_settings(folder: Path) -> Settings:
    """The settings of a run's data module. The images that it held out stay the same, even if the folder has grown.

    Raises:
        UserError: the run's configuration does not hold them.
    """
    path = rundir.config(folder)
    settings = read(path).get("data")
    if not isinstance(settings, dict):
        raise UserError(f"{path} does not say how images are prepared: it has no settings under data")
    if "val_list" in settings and (folder / rundir.VALIDATION).is_file():
        settings["val_list"] = str(folder / rundir.VALIDATION)
    return settings


def accepted(kind: Any, settings: Settings) -> Settings:
    """Those of the settings that the constructor of a class takes, by its parameters and those of its bases."""
    names: set[str] = set()
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: value for name, value in settings.items() if name in names}

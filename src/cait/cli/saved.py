"""The configuration that a run has saved."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cait import disk, signature
from cait.guards import configurations
from cait.run import rundir
from cait.settings import Settings, flatten

PARTS = {"model": {"name": str, "fields?": dict}, "data": {"root": str}, "trainer?": dict}
"""What verbs read in a run's configuration."""


def read(path: Path, text: str | None = None) -> dict[str, Any]:
    """The settings in a run's config.yaml.

    Args:
        text: what it holds, if that has been read already.

    Raises:
        UserError: it is no configuration.
    """
    return configurations.settings(path, text)


def without_absent(config: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """(`config` without settings and classes of extras that are not here, names of those left out that were set)

    Args:
        config: as `read` returns it.
        known: every setting and group of settings, as "model" and "model.lr".
    """
    kept = {key: value for key, value in config.items() if key in known}
    if isinstance(data := kept.get("data"), dict):  # the other groups that extras add settings to
        kept["data"] = {key: value for key, value in data.items() if f"data.{key}" in known}
    if isinstance(model := kept.get("model"), dict):  # without one that is on, the run would be another
        kept["model"] = {key: value for key, value in model.items() if f"model.{key}" in known or value}
    held = flatten(kept)
    left_out = [key for key, value in flatten(config).items() if key not in held and value not in (None, False, [], {})]
    if not isinstance(trainer := kept.get("trainer"), dict):
        return kept, left_out
    present = {name: _present(value) for name, value in trainer.items()}
    left_out += [f"trainer.{name}" for name, value in trainer.items() if present[name] != value]
    kept["trainer"] = {name: value for name, value in present.items() if value is not None or trainer[name] is None}
    return kept, left_out


def _present(value: Any) -> Any:
    """A value of the Trainer without classes of this package that are not here; None if nothing is left."""
    if isinstance(value, list):
        return [item for item in value if _present(item) is not None]
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str) or not path.startswith(("cait.", "contrib.")):
        return value
    try:
        found = find_spec(path.rpartition(".")[0])
    except ModuleNotFoundError:  # the package that it lies in
        found = None
    return None if found is None else value


def of_run(folder: Path) -> dict[str, Any]:
    """The settings of a run, to show them. Raises UserError if its configuration does not say what it trained."""
    path = rundir.config(folder)
    config = read(path)
    disk.check_shape(config, PARTS, path)
    return config


def data_settings(folder: Path) -> Settings:
    """The settings of a run's data module. The images that it held out stay the same, even if the folder has grown.

    Raises:
        UserError: the run's configuration does not hold them.
    """
    path = rundir.config(folder)
    text = configurations.read_text(path)
    settings: Any = read(path, text).get("data")
    disk.check_shape(settings, dict, path, "data")
    if not signature.is_own(text):
        from cait.guards import trust

        trust.check_code(path, settings, None)
        settings = {name: value for name, value in settings.items() if trust.may_say(f"data.{name}", value)}
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

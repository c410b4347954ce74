"""The configuration that a run has saved."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cait import disk
from cait.guards import configurations
from cait.run import rundir
from cait.settings import Settings, flatten, values

PARTS = {"model": {"name": str, "fields?": dict}, "data": {"root": str}, "trainer?": dict}
"""What verbs read in a run's configuration."""
CLASSES = ("callbacks", "logger", "plugins", "profiler")
"""Settings of the Trainer that name classes."""
WORDS = ("accelerator", "strategy")
"""Those that may be one of Lightning's words too, such as "ddp"."""
OFF: tuple[Any, ...] = (None, False, [], {})


def without_absent(config: Settings, known: Collection[str]) -> tuple[Settings, list[str]]:
    """(`config` without the settings of extras that are not here, names of those left out that were set)

    Args:
        known: every setting and group of settings of the verb, as "model" and "model.lr".
    """
    kept = {name: value for name, value in config.items() if name in known}
    for group in {"data", "model"} & kept.keys():
        if isinstance(settings := kept[group], dict):
            # One of the model that is set stays, and is refused: without it the run would be another.
            must_stay = {key for key, value in settings.items() if group == "model" and value}
            kept[group] = {key: settings[key] for key in settings if f"{group}.{key}" in known or key in must_stay}
    held = flatten(kept)
    return kept, [name for name, value in flatten(config).items() if name not in held and value not in OFF]


def without_classes(config: Settings) -> Settings:
    """`config` without what makes the Trainer build a class, which scoring does not need."""
    trainer = config.get("trainer")
    if not isinstance(trainer, dict):
        return config
    classes = {*CLASSES, *(name for name in WORDS if "." in str(trainer.get(name)))}
    return config | {"trainer": {name: trainer[name] for name in trainer.keys() - classes}}


def of_run(folder: Path) -> Settings:
    """The settings of a run, to show them. Raises UserError if its configuration does not say what it trained."""
    path = rundir.config(folder)
    config = configurations.settings(path)
    disk.check_shape(config, PARTS, path)
    return config


def data_settings(folder: Path) -> Settings:
    """The settings of a run's data module; of a stranger's run where its images are and how they are prepared.

    The images that it held out stay the same, even if the folder has grown.

    Raises:
        UserError: the run's configuration does not hold them.
    """
    path = rundir.config(folder)
    text = configurations.read_text(path)
    settings: Any = configurations.settings(path, text).get("data")
    disk.check_shape(settings, dict, path, "data")
    from cait.guards import trust

    if not trust.is_own(text):
        trust.check_code(path, settings, None)
        settings = {name: value for name, value in settings.items() if name in _of_images()}
    if "val_list" in settings and (folder / rundir.VALIDATION).is_file():
        settings["val_list"] = str(folder / rundir.VALIDATION)
    return settings


def _of_images() -> set[str]:
    from cait.data.folder import Splits
    from cait.data.transforms import Preprocessing

    return {"class_names", *values(Splits()), *values(Preprocessing())}


def accepted(kind: Any, settings: Settings) -> Settings:
    """Those of the settings that the constructor of a class takes, by its parameters and those of its bases."""
    names: set[str] = set()
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: value for name, value in settings.items() if name in names}

"""The configuration that a run has saved."""

import inspect
from pathlib import Path
from typing import Any

from cait import disk, references
from cait.guards import configurations, trust
from cait.run import rundir
from cait.settings import Settings, names_in

PARTS = {"model": {"name": str, "fields?": dict}, "data": {"root": str}, "trainer?": dict}
"""What verbs read in a run's configuration."""


def run_settings(folder: Path) -> Settings:
    """The settings of a run, to show them. Raises UserError if its configuration does not say what it trained."""
    path = rundir.config(folder)
    config = configurations.settings(path)
    disk.check_shape(config, PARTS, path)
    return config


def data_settings(folder: Path) -> Settings:
    """The settings of a run's data module; of someone else's run only those that `image_settings` takes.

    The images that it held out stay the same, even if the folder has grown.
    """
    path = rundir.config(folder)
    text = configurations.read_text(path)
    settings: Any = configurations.settings(path, text).get("data")
    disk.check_shape(settings, dict, path, "data")
    if not trust.is_own(text):
        trust.check_code(path, settings, None)
        settings = image_settings(settings)
    if "val_list" in settings and (folder / rundir.VALIDATION).is_file():
        settings["val_list"] = str(folder / rundir.VALIDATION)
    return settings


def data_class(folder: Path) -> Any:
    """The class of a run's data module, if its configuration names one. Raises UserError if it cannot be used."""
    path = rundir.config(folder)
    text = configurations.read_text(path)
    name: Any = configurations.settings(path, text).get("data_module")
    if name is None:
        return None
    disk.check_shape(name, str, path, "data_module")
    if not trust.is_own(text):
        trust.check_code(path, name, None)
    from cait.data.datamodule import ImageNetDataModule

    return references.subclass(name, ImageNetDataModule)


def image_settings(settings: Settings) -> Settings:
    """Those of a data module's settings that say where its images are and how they are prepared."""
    from cait.data.datamodule import PREPARATION
    from cait.data.folder import Splits

    names = {"class_names", *names_in(Splits), *names_in(PREPARATION)}
    return {name: value for name, value in settings.items() if name in names}


def init_arguments(kind: Any, group: Any, settings: Settings) -> Settings:
    """Those of the settings that the constructor of a class takes, also by `**kwargs` to its base and to the group."""
    names: set[str] = set()
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        names |= parameters.keys()
        if "settings" in parameters:
            names |= {*names_in(group)}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return {name: value for name, value in settings.items() if name in names}

"""The configuration that a run has saved."""

import inspect
from pathlib import Path
from typing import Any

from cait import disk, references, signature
from cait.guards import configurations
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
    settings, is_own = _trusted(folder, "data", dict)
    if not is_own:
        settings = image_settings(settings)
    if "val_list" in settings and (folder / rundir.VALIDATION).is_file():
        settings["val_list"] = str(folder / rundir.VALIDATION)
    return settings


def data_class(folder: Path) -> Any:
    """The class of a run's data module, if its configuration names one. Raises UserError if it cannot be used."""
    name, _ = _trusted(folder, "data_module", str | None)
    if name is None:
        return None
    from cait.data.datamodule import ImageNetDataModule

    return references.subclass(name, ImageNetDataModule)


def _trusted(folder: Path, name: str, shape: Any) -> tuple[Any, bool]:
    """(a setting of a run, whether the run is the user's own). Raises UserError if another's names code in it."""
    path = rundir.config(folder)
    text = configurations.read_text(path)
    value = configurations.settings(path, text).get(name)
    disk.check_shape(value, shape, path, name)
    is_own = signature.is_own(text)
    if not is_own:
        signature.check_code(path, value, None)
    return value, is_own


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

"""`--from FILE|timm|RUN`: the weights that a run starts from, and the settings that must match them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cait import ckpt
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.run import rundir

TIMM = "timm/"
OF_IMAGES = ("img_size", "mean", "std", "interpolation", "crop_pct")


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and the settings that go with them."""

    name: str
    settings: dict[str, Any]
    """Such as "model.weights", and those of the weights' network."""


def initial_weights(source: str) -> Weights:
    """The weights that `source` names: "timm", a file, or a run of this project.

    Raises:
        UserError: there are no such weights, or the run's network is code of its own.
    """
    if source == "timm":
        return Weights("timm's, pretrained on ImageNet", {"model.pretrained": True})
    folder = Path(source).absolute().parent.parent
    if Path(source).is_file() and source.endswith(".ckpt") and (folder / rundir.CONFIG).is_file():
        return _of_run(folder, Path(source))
    if Path(source).is_file():
        return Weights(source, {"model.weights": source})
    folder = rundir.folder_of(source)
    return _of_run(folder, rundir.best_checkpoint(folder, "start from"))


def _of_run(folder: Path, best: Path) -> Weights:
    """The weights of a run's checkpoint, their moving average if kept, with its network's and images' settings."""
    text = rundir.config(folder).read_text(encoding="utf-8")
    try:
        config = yaml.safe_load(text)
        model, data = config["model"], config["data"]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise UserError(f"{rundir.config(folder)} is not the configuration of a run") from error
    name = str(model.get("name", "xxs24"))
    if name not in VARIANTS and not name.startswith(TIMM):
        raise UserError(f"the network of {folder} is code, {name}: give --model.weights {best}")
    settings: dict[str, Any] = {"model.weights": str(best)}
    if ckpt.average(ckpt.read_checkpoint(best, without=["optimizer_states"])):
        settings["model.weights_ema"] = True
    settings["model.name"] = name
    settings |= {f"model.fields.{key}": value for key, value in (model.get("fields") or {}).items()}
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(best), settings)

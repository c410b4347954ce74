"""`--from FILE|timm|RUN`: the weights that a run starts from, and the settings that must match them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cait import ckpt
from cait.cli import saved
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.run import rundir

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
    path = Path(source)
    if not path.is_file():
        folder = rundir.folder_of(source)
        return _of_run(folder, rundir.best_checkpoint(folder, "start from"))
    folder = path.absolute().parent.parent
    if path.suffix == ".ckpt" and (folder / rundir.CONFIG).is_file():
        return _of_run(folder, path)
    return Weights(source, {"model.weights": source})


def _of_run(folder: Path, checkpoint: Path) -> Weights:
    """The weights of a run's checkpoint, their moving average if kept, with its network's and images' settings."""
    config = saved.read(rundir.config(folder))
    model, data = config.get("model") or {}, config.get("data") or {}
    name = str(model.get("name", "xxs24"))
    if name not in VARIANTS and not name.startswith("timm/"):
        raise UserError(f"the network of {folder} is code, {name}: give --model.weights {checkpoint}")
    settings: dict[str, Any] = {"model.weights": str(checkpoint)}
    if ckpt.average(ckpt.read_checkpoint(checkpoint, without=["optimizer_states"])):
        settings["model.weights_ema"] = True
    settings["model.name"] = name
    settings |= {f"model.fields.{key}": value for key, value in (model.get("fields") or {}).items()}
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(checkpoint), settings)

"""`--from FILE|timm|RUN`: the weights that a run starts from, and the settings that must match them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cait import ckpt
from cait.cli import saved
from cait.cli.loading import checkpoint_of
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.model.network import build
from cait.model.weights import load_weights
from cait.run import rundir

OF_IMAGES = ("img_size", "mean", "std", "interpolation", "crop_pct", "fit")
FIELDS = "model.fields."


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and the settings that go with them."""

    name: str
    settings: dict[str, Any]
    """Such as "model.weights", and those of the weights' network."""


def check(settings: Mapping[str, Any]) -> None:
    """Refuse weights of another network than the settings name, before a trial of it takes time.

    Raises:
        UserError: the weights do not fit.
    """
    path, name = settings.get("model.weights"), settings.get("model.name", "xxs24")
    fields = {key.removeprefix(FIELDS): value for key, value in settings.items() if key.startswith(FIELDS)}
    if path is None:
        return
    try:
        with torch.device("meta"):
            network = build(name, settings.get("data.img_size", 224), 2, None, **fields)
    except Exception:  # a network of the user's own may do anything, and a run names what is wrong
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that nothing is copied
            load_weights(network, path, settings.get("model.weights_ema", False))
    except UserError as error:
        raise UserError(f"{error}; --model.name says which network to train, here {name}") from error


def initial_weights(source: str) -> Weights:
    """The weights that `source` names: "timm", a file, or a run of this project.

    A run gives the moving average of its weights if it kept one, and its network's and images' settings.

    Raises:
        UserError: there are no such weights, or the run's network is code of its own.
    """
    if source == "timm":
        return Weights("timm's, as published", {"model.pretrained": True})
    from cait.guards import trust

    path, folder = checkpoint_of(source, "start from")
    if folder is None or path.suffix != ".ckpt":
        return Weights(source, {"model.weights": source})
    config = saved.of_run(folder)
    model, data, name = config["model"], saved.data_settings(folder), config["model"]["name"]
    if name not in VARIANTS and not name.startswith("timm/"):
        raise UserError(f"the network of {folder} is code, {name}: give --model.weights {path}")
    settings: dict[str, Any] = {"model.weights": str(path)}
    if ckpt.average(ckpt.read_checkpoint(path, without=["optimizer_states"])):
        settings["model.weights_ema"] = True
    settings["model.name"] = name
    fields = {"model": {"fields": model.get("fields") or {}}}
    fields = trust.as_data(fields, (), rundir.config(folder), (), own=False, builds=True)["model"]["fields"]
    settings |= {f"model.fields.{key}": value for key, value in fields.items()}
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(path), settings)

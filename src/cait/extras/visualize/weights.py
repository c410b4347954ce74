"""Networks from weights that are of no run: a file of one of the paper's models, or what timm publishes."""

from __future__ import annotations

import math

from cait.cli.loading import AVERAGE, Loaded, readable_names
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError, one_line
from cait.model import network
from cait.model.network import create_model
from cait.model.weights import load_pretrained, load_weights, published_entries, read_weights


def from_weights(path: str, name: str, ema: bool, img_size: int | None) -> Loaded:
    """Load a file with the weights of one of the paper's models: the release's, timm's, or any other's."""
    state, _ = read_weights(path, ema)
    try:
        classes, positions = len(state["head.weight"]), state["pos_embed"].shape[1]
        patch_size = state["patch_embed.proj.weight"].shape[-1]
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{path} is of another network than {name}: {one_line(error)}") from error
    size = math.isqrt(positions) * patch_size if img_size is None else img_size
    built = create_model(name, size, classes, patch_size=patch_size)
    about = "; ".join([f"{path}{AVERAGE * ema}", *load_weights(built, path, ema)])
    return Loaded(built.eval(), name, about, readable_names(None, classes), ImageNetDataModule(img_size=size))


def from_timm(name: str, img_size: int | None) -> Loaded:
    """Load the weights that timm publishes for a model, at their lowest resolution unless `img_size` is given."""
    size = min(published_entries(name), default=224) if img_size is None else img_size
    built = network.build(name, size, 1000)
    network.require(built, name, "maps", "visualize")  # before anything is fetched
    about = "; ".join(load_pretrained(built, name))
    return Loaded(built.eval(), name, about, readable_names(None, 1000), ImageNetDataModule(img_size=size))

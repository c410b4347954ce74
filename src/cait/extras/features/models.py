"""A network by its name, with the weights of a file or those that timm publishes."""

from __future__ import annotations

from typing import Any

from cait.cli.loading import Loaded
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.model import network
from cait.model.config import TIMM, VARIANTS
from cait.model.weights import load_pretrained, load_weights, published_entries


def named(name: str, weights: str | None, img_size: int | None) -> Loaded:
    """The network `name` in evaluation, and how its images are prepared.

    Images are prepared as timm has them for its networks, at the size of the weights unless `img_size` is given.

    Args:
        name: as `--model.name` takes it.
        weights: a file; None takes timm's published weights.

    Raises:
        UserError: there is no such network, or its weights cannot be loaded.
    """
    known = _published(name)
    size = img_size or known.pop("img_size")
    built = network.build(name, size, known.pop("num_classes"))
    notes = [weights, *load_weights(built, weights)] if weights else load_pretrained(built, name)
    notes = [note for note in notes if not note.startswith("the head")]  # no feature depends on it
    data = ImageNetDataModule(**known | {"img_size": size})
    return Loaded(built.eval(), name, "; ".join(notes), [], data)


def _published(name: str) -> dict[str, Any]:
    """The size of the images, the number of classes and how images are prepared for the published weights."""
    if not name.startswith(TIMM):
        size = min(published_entries(name), default=224) if name in VARIANTS else 224
        return {"img_size": size, "num_classes": 1000}
    import timm

    if (found := timm.get_pretrained_cfg(name.removeprefix(TIMM))) is None:
        return {"img_size": 224, "num_classes": 1000}
    if found.input_size[0] != 3:
        raise UserError(f"{name} takes images of {found.input_size[0]} channels")
    how = {key: getattr(found, key) for key in ("num_classes", "mean", "std", "interpolation", "crop_pct")}
    return how | {"img_size": found.input_size[-1]}

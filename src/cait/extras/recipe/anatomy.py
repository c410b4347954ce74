"""What a network is made of, seen without its weights: what the rules choose by, whatever its name is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cait.extras.gmacs import forward_gmacs
from cait.model import network

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Anatomy:
    """A network for images of one size."""

    gmacs: float
    """10⁹ multiply-adds of an image."""
    matrices: float
    """Share of the weights that are in linear layers; the others are mostly in convolutions."""
    attention: bool
    patch: int
    """Side of the patches that a first convolution cuts, or its stride."""


def look(name: str, size: int, fields: Mapping[str, Any]) -> Anatomy | None:
    """The anatomy of the network `name` for images of `size` pixels.

    None if there is none: it takes no images of this size, or it is code that does not run without weights.
    """
    try:
        with torch.device("meta"):
            built = network.build(name, size, 2, None, **fields)
        cost = forward_gmacs(built, (fields.get("in_chans", 3), size, size))
    except Exception:  # a network of the user's own may do anything, and a run names what is wrong
        return None
    if cost is None:
        return None
    layers = [*built.modules()]
    weights = {kind: sum(layer.weight.numel() for layer in layers if isinstance(layer, kind)) for kind in KINDS}
    first = next((layer for layer in layers if isinstance(layer, nn.Conv2d)), None)
    return Anatomy(
        gmacs=cost,
        matrices=weights[nn.Linear] / max(1, sum(weights.values())),
        attention=any(re.search("attn|attention", type(layer).__name__.lower()) for layer in layers),
        patch=int(first.stride[0]) if first is not None else 1,
    )

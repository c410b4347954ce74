"""What a network is made of, seen without its weights: what the rules choose by, whatever its name is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cait.model import network


@dataclass(frozen=True)
class Anatomy:
    matrices: float
    """Share of the weights that are in linear layers; the others are mostly in convolutions."""
    attention: bool
    patch: int
    """Side of the patches that a first convolution cuts, or its stride."""


def arguments_of(settings: Mapping[str, Any], room: str) -> dict[str, Any]:
    """The settings of "model" or "data" as arguments of its class, those of `model.fields.depth` in a dictionary."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        of, _, path = name.partition(".")
        key, _, inner = path.partition(".")
        if of == room:
            found[key] = (found.get(key) or {}) | {inner: value} if inner else value
    return found


def without_weights(settings: Mapping[str, Any], size: int) -> nn.Module | None:
    """The network that the settings name, for images of `size` pixels; None if it cannot be built."""
    named = arguments_of(settings, "model")
    try:
        with torch.device("meta"):
            return network.build(named.get("name", "xxs24"), size, 2, None, **(named.get("fields") or {}))
    except Exception:  # a network of the user's own may do anything, and a run names what is wrong
        return None


def look(settings: Mapping[str, Any], size: int) -> Anatomy | None:
    """The anatomy of that network; None if it takes no images of this size, or is code that needs its weights."""
    if (built := without_weights(settings, size)) is None:
        return None
    channels = (arguments_of(settings, "model").get("fields") or {}).get("in_chans", 3)
    try:
        with torch.no_grad():
            built.to("meta").eval()(torch.empty(1, channels, size, size, device="meta"))
    except Exception:  # as above
        return None
    layers = [*built.modules()]
    weights = [layer for layer in layers if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    in_linear = sum(layer.weight.numel() for layer in weights if isinstance(layer, nn.Linear))
    return Anatomy(
        matrices=in_linear / max(1, sum(layer.weight.numel() for layer in weights)),
        attention=any(re.search("attn|attention", type(layer).__name__.lower()) for layer in layers),
        patch=next((int(layer.stride[0]) for layer in layers if isinstance(layer, nn.Conv2d)), 1),
    )

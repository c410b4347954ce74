"""What a network costs: parameters and multiply-adds, without weights or a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cait.model.cait import CaiT
from cait.model.config import CaiTConfig


@dataclass(frozen=True)
class Cost:
    parameters: int
    gmacs: float
    """10⁹ multiply-adds of a forward pass on one image, over its matrix products and convolutions."""
    gmacs_published: float
    """The same with one token more in every self-attention block.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


def measure(config: CaiTConfig) -> Cost:
    """Count on the meta device, so that the largest model takes no memory."""
    with torch.device("meta"):
        model = CaiT(config).eval().requires_grad_(False)
        images = torch.empty(1, config.in_chans, config.img_size, config.img_size)
        tokens = torch.empty(1, config.num_patches, config.embed_dim)
        more_tokens = torch.empty(1, config.num_patches + 1, config.embed_dim)
    gmacs = _gmacs(model, images)
    extra = 0.0
    if config.class_token_at is None and config.depth:
        extra = config.depth * (_gmacs(model.blocks[0], more_tokens) - _gmacs(model.blocks[0], tokens))
    return Cost(sum(parameter.numel() for parameter in model.parameters()), gmacs, gmacs + extra)


def _gmacs(module: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2 / 1e9

"""What a CaiT costs: parameters and multiply-adds, counted without weights or a device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cait.model.cait import CaiT
from cait.model.config import CaiTConfig


class Cost(NamedTuple):
    parameters: int
    gmacs: float
    """10⁹ multiply-adds of a forward pass on one image, over its matrix products and convolutions."""
    gmacs_published: float
    """The same with one more token in every self-attention block.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


@functools.cache
def cost(config: CaiTConfig) -> Cost:
    """Count on the meta device, so that the largest model takes no memory.

    The self-attention blocks are alike, so one is counted for all with the same number of tokens.
    """
    n, depth = config.num_patches, config.depth
    joined = 0 if config.class_token_at is None else depth - config.class_token_at  # blocks with the class token
    with torch.device("meta"):
        model = CaiT(config).eval().requires_grad_(False)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        alone, one_more = (_gmacs(model.blocks[0], torch.empty(1, tokens, config.embed_dim)) for tokens in (n, n + 1))
        model.blocks = nn.Sequential(*(nn.Identity() for _ in range(depth)))
        rest = _gmacs(model, torch.empty(1, config.in_chans, config.img_size, config.img_size))
    gmacs = rest + (depth - joined) * alone + joined * one_more
    return Cost(parameters, gmacs, rest + depth * one_more)


def _gmacs(module: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2e9

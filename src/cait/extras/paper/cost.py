"""What a CaiT costs: parameters and multiply-adds, without weights or a device."""

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
    """The same with one more token in every self-attention block.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


def measure(config: CaiTConfig) -> Cost:
    """Count on the meta device, so that the largest model takes no memory.

    The self-attention blocks are alike, so one is counted for all with the same number of tokens.
    """
    n, at = config.num_patches, config.class_token_at
    with torch.device("meta"):
        model = CaiT(config).eval().requires_grad_(False)
        images = torch.empty(1, config.in_chans, config.img_size, config.img_size)
        tokens = {count: torch.empty(1, count, config.embed_dim) for count in (n, n + 1, n + config.num_class_tokens)}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    block = {count: _gmacs(model.blocks[0], x) for count, x in tokens.items()} if config.depth else {}
    model.blocks = nn.Sequential(*(nn.Identity() for _ in range(config.depth)))
    rest = _gmacs(model, images)
    with_token = 0 if at is None else config.depth - at
    gmacs = rest + sum(block[n + (config.num_class_tokens if i < with_token else 0)] for i in range(config.depth))
    return Cost(parameters, gmacs, rest + sum(block[n + 1] for _ in range(config.depth)))


def _gmacs(module: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2 / 1e9

"""The weights that a CaiT starts from, and how two networks' weights differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def draw(network: Any) -> None:
    """Draw linear weights, positions and class token of a CaiT from a normal of std .02 cut at ±2; set biases to 0.

    The patch projection keeps PyTorch's default, as in the released code.
    """
    for name in ("pos_embed", "cls_token"):
        if hasattr(network, name):
            nn.init.trunc_normal_(getattr(network, name), std=0.02)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    blocks = [*network.blocks, *network.blocks_token_only]
    if network.config.residual == "fixup":
        scale_as_fixup(blocks, network.head)
    elif network.config.residual == "t-fixup":
        scale_as_t_fixup(blocks)


@torch.no_grad()
def scale_as_fixup(blocks: list[Any], head: nn.Linear) -> None:
    """Fixup: set the classifier and the last layer of every branch to 0, scale its first layer by L^(-1/(2m-2)).

    L is the number of branches, two a block, of m = 2 layers each (qkv and proj, fc1 and fc2).
    """
    nn.init.zeros_(head.weight)
    for name, layer in _linear_layers(blocks):
        if name in ("attn.proj", "mlp.fc2"):
            nn.init.zeros_(layer.weight)
        elif name in ("attn.qkv", "attn.q", "attn.k", "attn.v", "mlp.fc1"):
            layer.weight.mul_((2 * len(blocks)) ** -0.5)


@torch.no_grad()
def scale_as_t_fixup(blocks: list[Any]) -> None:
    """T-Fixup: Xavier, then scale value, attention output and FFN weights by 0.67 · L^(-1/4) for L blocks."""
    factor = 0.67 * len(blocks) ** -0.25
    for name, layer in _linear_layers(blocks):
        if name == "attn.qkv":
            for part in layer.weight.chunk(3):
                nn.init.xavier_uniform_(part)
            layer.weight.chunk(3)[2].mul_(factor)
        elif name not in ("attn.proj_l", "attn.proj_w"):
            nn.init.xavier_uniform_(layer.weight)
            if name in ("attn.v", "attn.proj", "mlp.fc1", "mlp.fc2"):
                layer.weight.mul_(factor)


def _linear_layers(blocks: list[Any]) -> list[tuple[str, nn.Linear]]:
    """The linear layers of each block by their name in it."""
    return [pair for block in blocks for pair in block.named_modules() if isinstance(pair[1], nn.Linear)]


def difference(weights: dict[str, Tensor], state: dict[str, Tensor]) -> str | None:
    """The first name or shape in which `state` is not that of the model, in words."""
    for key in [*weights, *state]:
        wanted, found = (tuple(side[key].shape) if key in side else "missing" for side in (weights, state))
        if wanted != found:
            return f"{key} is {found} in it, {wanted} in the model"
    return None

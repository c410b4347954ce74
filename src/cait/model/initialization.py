"""The weights that a CaiT starts from: drawn at random, or those of another resolution made to fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cait.errors import UserError


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


def fit(state: dict[str, Tensor], network: Any) -> list[str]:
    """Resize the positions among the weights of a CaiT to another network's, in place; a line if that changes them.

    Raises:
        UserError: the stem is another, or the positions form no square grid.
    """
    theirs, ours = ({key for key in side if key.startswith("patch_embed.")} for side in (state, network.state_dict()))
    if theirs and theirs != ours:
        raise UserError(f"its stem or patch_size is another; this one's stem is {network.config.stem}")
    before, after = state.get("pos_embed"), network.pos_embed
    if before is None or before.shape == after.shape or before.shape[-1] != after.shape[-1]:
        return []  # of another width it is another network, which the caller finds out
    if network.config.class_token_at == 0:
        return []  # the class token's position is no part of a grid
    patches = network.config.num_patches
    state["pos_embed"] = resize_positions(before, patches)
    return [f"positions resized from {before.shape[1]} to {patches} patches"]


def difference(weights: dict[str, Tensor], state: dict[str, Tensor]) -> str | None:
    """The first name or shape in which `state` is not that of the model, in words."""
    for key in [*weights, *state]:
        wanted, found = (tuple(side[key].shape) if key in side else "missing" for side in (weights, state))
        if wanted != found:
            return f"{key} is {found} in it, {wanted} in the model"
    return None


def resize_positions(pos_embed: Tensor, num_patches: int) -> Tensor:
    """Resize positions [1, N, d] of a square grid to another square grid, [1, num_patches, d].

    Bicubic without antialiasing, as the released code did.
    """
    from timm.layers import resample_abs_pos_embed  # here, because the network needs torch alone

    before, after = (int(n**0.5) for n in (pos_embed.shape[1], num_patches))
    if before**2 != pos_embed.shape[1] or after**2 != num_patches:
        raise UserError(f"positions can be resized between square grids, not {pos_embed.shape[1]} to {num_patches}")
    return resample_abs_pos_embed(pos_embed, [after, after], num_prefix_tokens=0, antialias=False)

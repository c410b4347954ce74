"""Where CaiT looks: the weights of the values in each of its blocks.

Shapes: B images, h heads, N patches.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cait.model.network import in_evaluation


class Maps(NamedTuple):
    """Attention maps of a batch, a tensor for each block: the weights that a query (row) gives the values."""

    self_attention: list[Tensor]
    """[B, h, N, N] each, mixed over the heads."""
    class_attention: list[Tensor]
    """[B, h, 1, 1 + N] each, the class token first."""


@torch.no_grad()
def attention_maps(network: Any, images: Tensor) -> Maps:
    """The attention maps of a CaiT for images [B, C, S, S], as in evaluation; not of compiled blocks."""
    maps: list[Tensor] = []
    with in_evaluation(network), ExitStack() as hooks:
        for block in [*network.blocks, *network.blocks_token_only]:
            hook = block.attn.register_forward_pre_hook(
                lambda attn, inputs: maps.append(attn.maps(inputs[0]))
            )
            hooks.enter_context(hook)
        network(images)
    depth = len(network.blocks)
    return Maps(maps[:depth], maps[depth:])

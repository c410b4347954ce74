"""The residual branches of CaiT one by one, to look inside a run; for any other network its parts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from cait.model.cait import Block, CaiT, ClassAttentionBlock


class Part(NamedTuple):
    """A part of a network that is measured by itself."""

    layer: int
    """From 1; class-attention blocks count on from the self-attention blocks."""
    name: str
    """"sa" or "ca" (attention), "ffn" or "ca_ffn" of CaiT's blocks; the module's name in another network."""
    parameters: list[nn.Parameter]
    """Of a branch: its γ, its norm and its attention or feed-forward layer."""
    gamma: Tensor | None = None
    """γ of a branch, [d] or [1]; None means 1, or that the part is no branch."""


def _blocks(network: CaiT) -> list[Any]:
    return [*network.blocks, *network.blocks_token_only]


def parts(network: nn.Module) -> list[Part]:
    """The branches of CaiT, two for each block, in the order of the forward pass; for another network its children."""
    if not isinstance(network, CaiT):
        named = [
            (name, weights)
            for name, child in _children(network)
            if (weights := list(child.parameters()))
        ]
        return [Part(layer, name, weights) for layer, (name, weights) in enumerate(named, start=1)]
    branches = []
    for layer, block in enumerate(_blocks(network), start=1):
        attention, ffn = (
            ("ca", "ca_ffn") if isinstance(block, ClassAttentionBlock) else ("sa", "ffn")
        )
        for name, gamma, *modules in (
            (attention, block.gamma_1, block.norm1, block.attn),
            (ffn, block.gamma_2, block.norm2, block.mlp),
        ):
            parameters = [parameter for module in modules for parameter in module.parameters()]
            branches.append(
                Part(layer, name, parameters if gamma is None else [gamma, *parameters], gamma)
            )
    return branches


def _children(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a network by name; the children of a Sequential or a ModuleList take its place."""
    for name, child in network.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        else:
            yield name, child


@torch.no_grad()
def measure(network: nn.Module, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Measure each branch of CaiT, in the order of `parts`, in a forward pass of its own; another network gives [].

    The pass draws no random number and changes nothing in the network: the blocks run uncompiled in evaluation mode,
    and batch norms take the statistics of the batch without recording them.

    Returns for each branch and image ‖γ·f(x)‖ / ‖x‖, and the root mean square of x, [B] each. x is what the residual
    connection adds the branch to, which in class attention is the class tokens alone. Norms and means are over the
    tokens and channels of an image, in float32 at least.
    """
    figures: list[tuple[Tensor, Tensor]] = []

    def add(block: Block, x: Tensor, y: Tensor, sample: None = None) -> Tensor:
        norm = _norms(x)
        figures.append((_norms(y) / norm, norm / x[0].numel() ** 0.5))
        return type(block).add(block, x, y, sample)

    if not isinstance(network, CaiT):
        return []
    changes = ("training", "track_running_stats", "run")
    before = [
        (module, {name: value for name, value in vars(module).items() if name in changes})
        for module in network.modules()
    ]
    try:
        for module in network.eval().modules():
            if isinstance(module, _BatchNorm):
                module.training = True
                module.track_running_stats = False
            if isinstance(module, Block):
                module.run = type(module).body
                module.add = partial(add, module)  # type: ignore[method-assign]
        network(images)
    finally:
        for module, values in before:
            vars(module).pop("add", None)
            vars(module).update(values)
    return figures


def _norms(x: Tensor) -> Tensor:
    """Norm of each image of x [B, ...]: [B]"""
    return torch.linalg.vector_norm(
        x.flatten(1), dim=1, dtype=torch.promote_types(x.dtype, torch.float32)
    )


def watch_gradients(
    network: nn.Module, look: Callable[[int, Tensor], None]
) -> list[RemovableHandle]:
    """Have `look(block, gradient)` called in the next backward pass, once or more for each block of CaiT.

    The gradient is the one with respect to the tokens that enter the block: [B, N, d], and the class tokens
    [B, T, d] in class attention. Blocks count from 0, so the number is `Part.layer` - 1. With checkpointed activations
    `look` may be called twice with the same gradient. The watch ends by `remove()` of the handles.
    """

    def enter(number: int, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[1] if isinstance(block, ClassAttentionBlock) else args[0]
        if x.requires_grad:
            x.register_hook(partial(look, number))

    watched = _blocks(network) if isinstance(network, CaiT) else []
    return [
        block.register_forward_pre_hook(partial(enter, number))
        for number, block in enumerate(watched)
    ]

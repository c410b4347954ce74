"""Lines about a network of one's own, before it trains."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from cait.errors import tell_once, told_as
from cait.model.network import in_evaluation, input_shape, two_images


class Advice(Callback):
    """Try the network twice on the same two images, and tell what `advice` finds."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        is_whole = not any(parameter.is_meta for parameter in pl_module.model.parameters())
        if stage == "fit" and is_whole:
            for line in advice(pl_module.model, input_shape(pl_module.hparams)):
                tell_once(f"{pl_module.name} {line}")


def advice(network: nn.Module, shape: Sequence[int]) -> Iterator[str]:
    """What is wrong with a network for images [C, H, W] of `shape`, a line for each."""
    images = two_images(shape)
    keep_numbers = torch.random.fork_rng(devices=[])  # a dropout must not change those of the run
    with told_as(f"the network fails on images of {list(shape)}"), keep_numbers:
        with in_evaluation(network):
            logits = network(images.clone())
        # Anew, because a hook may put the network into training. Last, so it keeps nothing that could not be copied.
        with in_evaluation(network), torch.no_grad():
            again = network(images.clone())
    if (logits >= 0).all() and ((logits.sum(dim=1) - 1).abs() < 1e-4).all():
        yield "ends in a softmax: leave that out, because the loss and every verb take logits"
    if not torch.allclose(logits, again, equal_nan=True):
        yield "gives other logits when it sees the same images again, also in evaluation: is a dropout on?"
    parameters = {id(parameter) for parameter in network.parameters()}
    others = [leaf for leaf in leaves(logits) if id(leaf) not in parameters]
    if others:
        yield (
            f"computes with weights {[*others[0].shape]} that are not its parameters: they neither train nor are "
            "saved; put layers that are in a list into nn.ModuleList"
        )


def leaves(result: Tensor) -> list[Tensor]:
    """The tensors that a gradient of the result reaches."""
    nodes: list[Any] = [result.grad_fn]
    seen: dict[Any, None] = {None: None}  # in the order of the walk
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen[node] = None
            nodes += [before for before, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]

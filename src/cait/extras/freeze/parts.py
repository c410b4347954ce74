"""The parts of a network: its head, the stem and the blocks; and what follows if some are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cait.errors import UserError
from cait.model.network import require
from cait.model.weights import classifier_keys

OF_CLASS_ATTENTION = ("cls_token", "dist_token", "blocks_token_only", "norm")
"""Parts of a CaiT that come after its blocks of self-attention. timm gives them the ids of these blocks."""


def head(network: nn.Module, name: str, wanted_by: str) -> list[str]:
    """Names of the parameters of the classifier. Raises UserError if the network `name` has none."""
    if not (names := classifier_keys(network)):
        raise UserError(f"{name} has no classifier, which {wanted_by} needs: give it get_classifier()")
    return names


def stages(network: Any, name: str) -> list[list[str]]:
    """Names of the parameters of the stem, and of each block or stage after it, without the head."""
    from timm.models import group_parameters

    require(network, name, "group_matcher", "model.freeze N")
    names = dict(group_parameters(network, network.group_matcher(coarse=True)))
    classifier, found = {*classifier_keys(network)}, []
    for depth in sorted(names):
        members = list(names[depth])
        if classifier.isdisjoint(members):
            found.append(members if depth == 0 else _of_one_child(members))
    if any(parameter.startswith("blocks_token_only.") for parameter, _ in network.named_parameters()):
        found = [[each for each in stage if not each.startswith(OF_CLASS_ATTENTION)] for stage in found]
    return [stage for stage in found if stage]


def _of_one_child(names: list[str]) -> list[str]:
    """Those in the child that the first lies in: timm counts the norm that follows the last block as a part of it."""
    child = names[0].partition(".")[0]
    return [name for name in names if name.partition(".")[0] == child]


def freeze(network: nn.Module, name: str, what: bool | int) -> None:
    """Let no gradient reach the weights of all but the head (True), or of the stem and the first blocks (a number).

    Raises:
        UserError: the network has no head, no order of its blocks, or too few of them.
    """
    if what is True:
        trained = head(network, name, "model.freeze true")
        frozen = [key for key, _ in network.named_parameters() if key not in trained]
    else:
        stem, *blocks = stages(network, name) or [[]]
        if what > len(blocks):
            raise UserError(f"model.freeze {what}: {name} has {len(blocks)} blocks; true trains the head alone")
        frozen = [*stem, *(key for block in blocks[:what] for key in block)]
    for key in frozen:
        network.get_parameter(key).requires_grad_(False)


def frozen_parts(network: nn.Module, whole: bool) -> Iterator[nn.Module]:
    """The largest modules in which nothing trains. Modules without parameters, as Dropout, count if `whole`."""
    trains = [parameter.requires_grad for parameter in network.parameters()]
    if not any(trains):
        if trains or whole:
            yield network
        return
    for child in network.children():
        yield from frozen_parts(child, whole)


def scale_head(optimizer: Optimizer, network: nn.Module, factor: float) -> None:
    """Split each group of the optimizer into the head's parameters and the others, and scale the rate of the first.

    The scale is the group's `lr_scale`, by which the schedule multiplies its rate, as layer decay has it.
    """
    weights = dict(network.named_parameters())
    heads = {id(weights[key]) for key in classifier_keys(network)}
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for of_head in (False, True):
            if members := [weight for weight in group["params"] if (id(weight) in heads) == of_head]:
                scale = group.get("lr_scale", 1.0) * (factor if of_head else 1.0)
                split.append({**group, "params": members, "lr_scale": scale})
    optimizer.param_groups[:] = split  # in place: timm's Lookahead shares the list with the optimizer in it

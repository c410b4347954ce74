"""Hold parts of a network as they are while the rest trains, and give the head a rate of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from cait import references
from cait.errors import UserError
from cait.model.network import require
from cait.model.weights import classifier_keys

OF_CLASS_ATTENTION = ("cls_token", "dist_token", "blocks_token_only", "norm")
"""Parts of a CaiT that come after its blocks of self-attention. timm gives them the ids of these blocks."""


@dataclass(frozen=True)
class FreezeSettings:
    """What keeps the weights that training starts from, and how fast the head learns.

    Raises:
        UserError: a setting is out of range.
    """

    freeze: bool | int = False
    """True trains the head alone. N keeps the patch embedding, the positions and the first N blocks as they are: of
    CaiT blocks of self-attention, of timm's networks the stages of `group_matcher(coarse=True)`. What is frozen
    computes as in evaluation, without stochastic depth, and its BatchNorm statistics stay."""
    freeze_norm: bool = False
    """BatchNorm keeps the statistics that the weights came with: it computes as in evaluation. Its scale and shift
    train."""
    solve_head: bool = False
    """If the run starts from weights and its head is new, solve the head on the features of the training images before
    the first step, and validate it as step 0. With `freeze` true the run is done then. A recipe chosen for a folder
    sets it."""
    head_lr_factor: float | None = None
    """The rate of the head is the others' times this factor; with `layer_decay` too. None means 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.freeze, bool) and self.freeze < 1:
            raise UserError(f"freeze must be true, false or a number of blocks from 1 on, got {self.freeze}")
        if self.head_lr_factor is not None and not self.head_lr_factor > 0:
            raise UserError(f"head_lr_factor must be above 0 or null, got {self.head_lr_factor}")


class Freeze(Callback):
    """Does nothing unless one of the LightningModule's `FreezeSettings` is given."""

    def __init__(self) -> None:
        self.held: list[nn.Module] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Freeze. The network has been built, and its weights, shards and optimizer come later."""
        if stage != "fit":
            return
        if (factor := pl_module.hparams.get("head_lr_factor")) is not None:
            head(pl_module.model, pl_module.name, "model.head_lr_factor")
            pl_module.model.head_lr_factor = factor
        if what := pl_module.hparams.get("freeze"):
            freeze(pl_module.model, pl_module.name, what)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        network, what = pl_module.model, pl_module.hparams.get("freeze")
        if what:
            self.held += frozen_parts(network, what is True)
            weights = list(network.parameters())
            count = sum(weight.numel() for weight in weights if not weight.requires_grad)
            rank_zero_info(f"frozen: {count:,} of {sum(weight.numel() for weight in weights):,} parameters")
        if pl_module.hparams.get("freeze_norm"):
            norms = [part for part in network.modules() if isinstance(part, _BatchNorm)]
            self.held += norms
            rank_zero_info(f"frozen: the statistics of {len(norms)} layers of BatchNorm")
        start = pl_module.initial_weights
        begins_anew = trainer.ckpt_path is None and start.weights is None and not start.pretrained
        if self.held and begins_anew and not references.is_path(pl_module.name):  # one's own may load its weights
            remedy = "give --model.weights FILE or --model.pretrained true"
            rank_zero_info(f"warning: what is frozen is random, because the run starts from no weights; {remedy}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for part in self.held:  # in each step, because others put the whole network into training
            if part.training:
                part.eval()


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

"""Hold parts of a network as they are while the rest trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait import references
from cait.errors import UserError
from cait.model.network import require

OF_CLASS_ATTENTION = ("cls_token", "blocks_token_only", "norm")
"""Parts of a CaiT that come after its blocks of self-attention. timm gives them the ids of these blocks."""


@dataclass(frozen=True)
class FreezeSettings:
    """What keeps the weights that training starts from."""

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

    def __post_init__(self) -> None:
        if not isinstance(self.freeze, bool) and self.freeze < 1:
            raise UserError(f"freeze must be true, false or a number of blocks from 1 on, got {self.freeze}")


class Freeze(Callback):
    """Does nothing unless one of the LightningModule's `FreezeSettings` is given."""

    def __init__(self) -> None:
        self.held: list[nn.Module] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Freeze. The network has been built, and its weights, shards and optimizer come later."""
        if stage == "fit" and (what := pl_module.hparams.get("freeze")):
            freeze(pl_module.model, pl_module.name, what)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        network, what = pl_module.model, pl_module.hparams.get("freeze")
        if what:
            self.held += frozen_parts(network, what is True)
            weights = list(network.parameters())
            count = sum(weight.numel() for weight in weights if not weight.requires_grad)
            rank_zero_info(f"frozen: {count:,} of {sum(weight.numel() for weight in weights):,} parameters")
        if pl_module.hparams.get("freeze_norm"):
            self.held += [part for part in network.modules() if isinstance(part, _BatchNorm)]
        start = pl_module.initial_weights
        has_weights = trainer.ckpt_path or start.weights or start.pretrained
        if self.held and not has_weights and not references.is_path(pl_module.name):  # one's own may load its weights
            rank_zero_info("warning: what is frozen is random: give --model.weights FILE or --model.pretrained true")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for part in self.held:  # in each step, because others put the whole network into training
            if part.training:
                part.eval()


def stages(network: Any, name: str) -> list[list[str]]:
    """Names of the parameters of the stem, and of each block or stage after it, without the head."""
    from timm.models import group_parameters

    from cait.model.weights import classifier_keys  # here, because runs that freeze nothing do not load it

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

    Raises UserError if the network has no head, no order of its blocks, or too few of them.
    """
    from cait.model.weights import classifier_keys

    if what is True:
        if not (trained := classifier_keys(network)):
            raise UserError(f"{name} has no classifier, which model.freeze true needs: give it get_classifier()")
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

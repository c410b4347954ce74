"""Hold all of a network but its head, or the statistics of BatchNorm, as they are while the rest trains."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait import references
from cait.errors import UserError


@dataclass(frozen=True)
class FreezeSettings:
    """What keeps the weights that training starts from."""

    freeze: bool = False
    """Train the head alone. The rest computes as in evaluation, without stochastic depth, and its BatchNorm statistics
    stay."""
    freeze_norm: bool = False
    """BatchNorm keeps the statistics that the weights came with: it computes as in evaluation. Its scale and shift
    train."""
    solve_head: bool = False
    """If the run starts from weights and its head is new, solve the head on the features of the training images before
    the first step, and validate it as step 0. With `freeze` the run is done then. A recipe chosen for a folder sets
    it."""


class Freeze(Callback):
    """Does nothing unless one of the LightningModule's `FreezeSettings` is given."""

    def __init__(self) -> None:
        self.held: list[nn.Module] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Freeze all but the head. The network has been built, and its weights, shards and optimizer come later."""
        if stage != "fit" or not pl_module.hparams.get("freeze"):
            return
        from cait.model.weights import classifier_keys  # here, because runs that freeze nothing do not load it

        trained = classifier_keys(pl_module.model)
        if not trained:
            raise UserError(f"{pl_module.name} has no classifier, which model.freeze needs: give it get_classifier()")
        for key, weight in pl_module.model.named_parameters():
            if key not in trained:
                weight.requires_grad_(False)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        parts, start = list(pl_module.model.modules()), pl_module.initial_weights
        if pl_module.hparams.get("freeze"):
            self.held += [part for part in parts if not any(weight.requires_grad for weight in part.parameters())]
        if pl_module.hparams.get("freeze_norm"):
            self.held += [part for part in parts if isinstance(part, _BatchNorm)]
        has_weights = trainer.ckpt_path or start.weights or start.pretrained
        if self.held and not has_weights and not references.is_path(pl_module.name):  # one's own may load its weights
            rank_zero_info("warning: what is frozen is random: give --model.weights FILE or --model.pretrained true")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for part in self.held:  # in each step, because others put the whole network into training
            if part.training:
                part.eval()

"""Hold all of a network but its head, its lower layers, or the statistics of BatchNorm, while the rest trains."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait import references
from cait.errors import UserError
from cait.settings import Group


@dataclass(frozen=True)
class FreezeSettings(Group):
    """What keeps the weights that training starts from."""

    freeze: bool | float = False
    """True: train the head alone. A number: hold this share of the layers, from the images on, as timm counts them. The
    rest computes as in evaluation, without stochastic depth, and its BatchNorm statistics stay."""
    freeze_norm: bool = False
    """BatchNorm keeps the statistics that the weights came with: it computes as in evaluation. Its scale and shift
    train."""
    solve_head: bool = False
    """If the run starts from weights and its head is new, solve the head on the features of the training images before
    the first step, and validate it as step 0. With `freeze` the run is done then. A recipe chosen for a folder sets
    it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.freeze, bool) and not 0 < self.freeze < 1:
            raise UserError(
                f"freeze must be true, false, or a share of the layers below 1, got {self.freeze:g}"
            )


class Freeze(Callback):
    """Does nothing unless one of the LightningModule's `FreezeSettings` is given."""

    def __init__(self) -> None:
        self.held: list[nn.Module] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Freeze parameters. The network has been built, and its weights, shards and optimizer come later."""
        freeze = pl_module.hparams.get("freeze")
        if stage != "fit" or not freeze:
            return
        from cait.extras.networks import lower_keys  # here, because other runs do not load it
        from cait.model.weights import classifier_keys

        network = pl_module.model
        name = pl_module.name
        if freeze is True:
            if not (trained := classifier_keys(network)):
                raise UserError(
                    f"{name} has no classifier, which model.freeze needs: give it get_classifier()"
                )
            frozen = {key for key, _ in network.named_parameters()}.difference(trained)
        elif hasattr(network, "group_matcher"):
            frozen = lower_keys(network, freeze)
        else:
            raise UserError(
                f"{name} names no layers, which model.freeze {freeze:g} needs: give it group_matcher()"
            )
        for key in frozen:
            network.get_parameter(key).requires_grad_(False)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        freeze = pl_module.hparams.get("freeze")
        freeze_norm = pl_module.hparams.get("freeze_norm")
        for layer in pl_module.model.modules():
            trains = [weight.requires_grad for weight in layer.parameters()]
            # a Dropout above goes on
            is_frozen = freeze and not any(trains) and (trains or freeze is True)
            if is_frozen or (freeze_norm and isinstance(layer, _BatchNorm)):
                self.held.append(layer)
        start = pl_module.settings
        has_weights = trainer.ckpt_path or start.weights or start.pretrained
        # one's own may load its weights
        if self.held and not has_weights and not references.is_path(pl_module.name):
            rank_zero_info(
                "warning: what is frozen is random: give --model.weights FILE or --model.pretrained true"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        for layer in self.held:  # in each step, because others put the whole network into training
            if layer.training:
                layer.eval()

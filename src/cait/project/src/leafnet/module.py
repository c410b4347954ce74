"""The LightningModule: cait's with another loss."""

from typing import Any

import cait
from torch import Tensor


class Module(cait.CaiTModule):
    """Punish answers that are too sure (https://arxiv.org/abs/1701.06548).

    Args:
        confidence_penalty: weight of the entropy in the loss; `model.confidence_penalty`.
        settings: those of cait.
    """

    def __init__(self, confidence_penalty: float = 0.1, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters("confidence_penalty")

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits [B, num_classes]; targets: labels [B], or [B, num_classes] after Mixup."""
        log_p = logits.log_softmax(dim=1)
        entropy = -(log_p.exp() * log_p).sum(dim=1).mean()
        return super().loss_of(logits, targets) - self.hparams["confidence_penalty"] * entropy

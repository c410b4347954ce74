"""Which classes a validation gets wrong throughout."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cait.datamodule import ImageNetDataModule


class ClassHits(Callback):
    """Count, by class, the images of the last validation and those that the raw weights get right.

    Args:
        data: the data module.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._counts: Tensor | None = None
        self.missed: list[str] = []
        """Classes that have images, none of which the last validation got right."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._counts = torch.zeros(2, pl_module.num_classes, device=pl_module.device)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if not isinstance(outputs, Tensor) or self._counts is None:  # a subclass returns what it likes
            return
        labels = batch[1]
        counted = labels >= 0
        right = counted & (outputs.argmax(dim=1) == labels)
        self._counts.index_add_(1, labels.clamp(min=0), torch.stack([right, counted]).to(self._counts))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._counts is not None
        right, images = trainer.strategy.reduce(self._counts, reduce_op="sum").cpu()
        if not trainer.sanity_checking:
            missed = ((right == 0) & (images > 0)).nonzero().flatten().tolist()
            self.missed = [self.data.class_names[index] for index in missed]

"""What the last validation shows that is probably a mistake: warned of once, at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cait.extras.screen.summary import first

TRAINED = 90.0
"""Accuracy in training, in per cent, with which a network has learned its training images."""
ENOUGH = 5
"""Images of a class in the validation from which on a prediction is expected."""


def findings(trained: float | None, counts: Tensor, predicted: Tensor, names: Sequence[str]) -> list[str]:
    """A line for each finding.

    Args:
        trained: the last accuracy in training, in per cent; None if it is not known.
        counts: (images, correct) of each class in the validation, [num_classes, 2].
        predicted: how often each class was predicted there, [num_classes].
        names: of the classes.
    """
    found = []
    images, right = counts.sum(dim=0).tolist()
    if images and trained is not None and trained >= TRAINED:
        largest = counts[:, 0].max().item() / images
        by_luck = largest + 2 * math.sqrt(largest * (1 - largest) / images)
        if right / images <= by_luck:
            found.append(
                f"training is right in {trained:.0f} % of the images, validation in {100 * right / images:.1f} %, no "
                "better than chance: look whether the validation images lie in the right class folders and look like "
                "the training images"
            )
    rows = zip(names, counts[:, 0].tolist(), predicted.tolist(), strict=True)
    if never := [name for name, count, times in rows if count >= ENOUGH and not times]:
        found.append(
            f"{len(never)} of {len(names)} classes are never predicted in the last validation ({first(never)}): train "
            "longer; if they have few training images, add --model.class_weights balanced"
        )
    return found


class Findings(Callback):
    """Count what each validation predicts, and print the findings of the last one after training."""

    def __init__(self) -> None:
        self._predicted: Tensor | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._predicted = None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        classes: int = getattr(pl_module, "num_classes", -1)
        one_class = isinstance(outputs, Tensor) and outputs.shape[1:] == (classes,) and batch[1].ndim == 1
        if trainer.sanity_checking or not one_class:
            return  # a validation step of your own returns what it likes
        best = outputs.argmax(dim=1)
        if self._predicted is None:
            self._predicted = torch.zeros(classes, dtype=torch.long, device=best.device)
        self._predicted.index_add_(0, best, torch.ones_like(best))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        counts = getattr(getattr(pl_module, "val_metrics", None), "per_class", None)
        if self._predicted is None or counts is None:
            return
        predicted = trainer.strategy.reduce(self._predicted, reduce_op="sum")
        if trainer.is_global_zero:
            trained = trainer.callback_metrics.get("train/acc1")
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            names = data.class_names if data is not None else [str(label) for label in range(len(counts))]
            for line in findings(None if trained is None else float(trained), counts.cpu(), predicted.cpu(), names):
                print(f"warning: {line}", flush=True)

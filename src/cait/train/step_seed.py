"""Dropout and stochastic depth as a function of (seed, epoch, step)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cait import seeds


class StepSeed(Callback):
    """Seed torch before every training step, so that a resumed run draws what the uninterrupted run would have drawn.

    Every process draws its own stream.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seed = seeds.training_step(self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type != "cpu":
            torch.get_device_module(pl_module.device).manual_seed(seed)

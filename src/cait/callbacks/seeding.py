"""Dropout and stochastic depth as a function of (seed, epoch, step)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cait.data.dataset import mix_seeds


class StepSeed(Callback):
    """Seed torch before every training step, so that a resumed run draws what the whole run would have drawn.

    Every process draws its own stream.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # The 1 sets this stream apart from that of the batch mixing.
        seed = mix_seeds(self.seed, trainer.current_epoch, batch_idx, trainer.global_rank, 1)
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(seed)

"""A Trainer and a module that only train: what is measured is not the screen, the loggers or the checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from cait.train.module import CaiTModule


class Flat(CaiTModule):
    """The module at one learning rate, without the schedule of lightning-bolts."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return self.optimizer_settings.build(self.model, lr=1e-3)


def trainer(devices: int | str = 1, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="auto",
        devices=devices,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )

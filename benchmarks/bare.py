"""A Trainer that only trains: what is measured is not the screen, the loggers or the checkpoints."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def trainer(**settings: Any) -> Trainer:
    return Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )

"""Settings that are probably mistakes, and a disk too small for the checkpoints: warned of when training starts."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sized
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from rich.filesize import decimal

from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.train.ema import EMA

FILES = 4
"""Checkpoints on the disk at once: last, previous, best, and one that is being written."""
VALUES = 3
"""Numbers of 4 bytes that a checkpoint has for each weight: the weight and AdamW's two moments."""


def doubts(trainer: Trainer, pl_module: Any, run_dir: Path | None) -> list[str]:
    """What is probably a mistake, one line each; nothing about the disk without a `run_dir`."""
    warmup, steps, _ = pl_module.schedule_length()
    found = []
    if warmup >= steps:
        found.append(
            f"the warm-up takes {warmup:,} steps (--model.warmup_epochs {pl_module.schedule.warmup_epochs:g}), "
            f"the run has {steps:,}: the learning rate only rises"
        )
    saves_best = any(isinstance(callback, BestCheckpoint) for callback in trainer.checkpoint_callbacks)
    if saves_best and not trainer.enable_validation:
        found.append("nothing is validated, so there will be no best.ckpt")
    validation = trainer.val_dataloaders
    if trainer.num_val_batches == [1] and isinstance(validation, Sized) and len(validation) > 1:
        found.append(
            f"--trainer.limit_val_batches {trainer.limit_val_batches} scores one batch of {len(validation)}: the "
            "accuracy and best.ckpt depend on its few images; leave it out, or give more"
        )
    if run_dir and (missing := shortage(run_dir, checkpoint_bytes(trainer, pl_module))):
        found.append(f"the disk of {run_dir} is {decimal(missing)} short of the checkpoints")
    return found


def checkpoint_bytes(trainer: Trainer, pl_module: Any) -> int:
    """What the run's checkpoints take on the disk while one is being written; 0 if it writes none."""
    if not trainer.checkpoint_callbacks:
        return 0
    average = any(isinstance(callback, EMA) and callback.decay for callback in trainer.callbacks)  # type: ignore[attr-defined]
    weights = sum(parameter.numel() for parameter in pl_module.model.parameters())
    return 4 * weights * (VALUES + average) * FILES


def shortage(run_dir: Path, needed: int) -> int:
    """Bytes that are missing on the disk; new checkpoints take the room of the existing ones."""
    files = itertools.chain(*(run_dir.glob(f"{rundir.CHECKPOINTS}/*.ckpt{inside}") for inside in ("", "/*")))
    existing = sum(path.stat().st_size for path in files if path.is_file())
    return max(0, needed - existing - shutil.disk_usage(run_dir).free)

"""Settings that are probably mistakes, and a disk too small for the checkpoints: warned of when training starts."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.run.summary import checkpoint_bytes, peak_rate, size


class Doubts(Callback):
    """Print a warning for each doubt; the run goes on.

    Args:
        run_dir: the run's folder; None if nothing is written.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        saves_best = any(isinstance(callback, BestCheckpoint) for callback in trainer.checkpoint_callbacks)
        found = doubts(trainer, pl_module, saves_best)
        if self.run_dir and (missing := shortage(self.run_dir, checkpoint_bytes(trainer, pl_module))):
            found.append(f"the disk of {self.run_dir} is {size(missing)} short of the checkpoints")
        for doubt in found:
            _warn(doubt)


def _warn(text: str) -> None:
    """Print a warning: wrapped to the width of a terminal, on one line in a log."""
    console = Console(markup=False, highlight=False)
    console.print(f"warning: {text}", soft_wrap=not console.is_terminal)


def doubts(trainer: Trainer, pl_module: Any, saves_best: bool) -> list[str]:
    """Settings that are probably mistakes, one line each."""
    steps, found = int(trainer.estimated_stepping_batches), []
    batches: float = trainer.num_training_batches
    each = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else steps
    warmup, peak = round(pl_module.schedule.warmup_epochs * each), peak_rate(trainer)
    if pl_module.schedule.lr == 0:
        found.append("--model.lr 0 learns nothing")
    elif pl_module.schedule.min_lr > peak:
        found.append(
            f"--model.min_lr {pl_module.schedule.min_lr:g} is above the peak, {peak:.3g}: the learning rate only rises"
        )
    if warmup >= steps:
        found.append(
            f"the warm-up takes {warmup:,} steps (--model.warmup_epochs {pl_module.schedule.warmup_epochs:g}), "
            f"the run has {steps:,}: the learning rate only rises"
        )
    if trainer.accumulate_grad_batches > trainer.num_training_batches:
        found.append(
            f"--trainer.accumulate_grad_batches {trainer.accumulate_grad_batches} is more than "
            f"the {trainer.num_training_batches} batches of an epoch"
        )
    every, epochs = trainer.check_val_every_n_epoch, math.ceil(steps / each)
    if saves_best and not trainer.enable_validation:
        found.append("nothing is validated, so there will be no best.ckpt")
    elif saves_best and every is not None and every > epochs:
        found.append(f"--trainer.check_val_every_n_epoch {every} validates never in {epochs} epochs: no best.ckpt")
    return found


def shortage(run_dir: Path, needed: int) -> int:
    """Bytes that are missing on the disk; new checkpoints take the room of the existing ones."""
    files = itertools.chain(*(run_dir.glob(f"{rundir.CHECKPOINTS}/*.ckpt{inside}") for inside in ("", "/*")))
    existing = sum(path.stat().st_size for path in files if path.is_file())
    return max(0, needed - existing - shutil.disk_usage(run_dir).free)

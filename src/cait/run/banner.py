"""At the start, what is going to run and whether the disk can hold it; after 20 steps, how long it takes."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from pathlib import Path
from typing import Any

import rich
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from cait.data.datamodule import ImageNetDataModule
from cait.extras.throughput.log import ThroughputLog
from cait.model import talking_heads
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.train.ema import EMA

STEPS = 20
"""Steps after which the time is estimated, from the second half of them."""
FILES = 4
"""Checkpoints on the disk at once: last, previous, best, and one that is being written."""
VALUES = 3
"""Numbers of 4 bytes that a checkpoint has for each weight: the weight and AdamW's two moments."""


def warn(text: str) -> None:
    """Print a warning: wrapped to the width of a terminal, on one line in a log."""
    console = Console(markup=False, highlight=False)
    console.print(f"warning: {text}", soft_wrap=not console.is_terminal)


class Banner(Callback):
    """Print a table of what is going to run when training starts, and an estimate of its time after `STEPS` steps.

    Args:
        data: the data module.
        run_dir: the run's folder; None if nothing is written.
    """

    def __init__(self, data: ImageNetDataModule, run_dir: Path | None) -> None:
        self.data, self.run_dir = data, run_dir

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._last = trainer.global_step
        if not trainer.is_global_zero:
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        show(self._rows(trainer, pl_module), f"training {self.run_dir.name}" if self.run_dir else "training")
        for doubt in doubts(trainer, pl_module, any(isinstance(callback, BestCheckpoint) for callback in callbacks)):
            warn(doubt)
        if self.run_dir and (missing := shortage(self.run_dir, checkpoint_bytes(trainer, pl_module))):
            warn(f"the disk of {self.run_dir} is {size(missing)} short of the checkpoints")

    def _rows(self, trainer: Trainer, pl_module: Any) -> dict[str, str]:
        data, processes, accumulated = self.data, trainer.world_size, trainer.accumulate_grad_batches
        parameters = sum(parameter.numel() for parameter in pl_module.model.parameters())
        logs = [callback for callback in trainer.callbacks if isinstance(callback, ThroughputLog)]  # type: ignore[attr-defined]
        cost = f", {logs[0].gmacs:.3g} GMACs an image" if logs and logs[0].gmacs else ""
        order = "shuffled" if data.order.name == "published" else data.order.name
        repeats = f", {data.repeats} times each" if data.repeats > 1 else ""
        device = pl_module.device.type.replace("cuda", "GPU").replace("cpu", "CPU")
        peak = max(group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups)
        images = data.batch_size * processes * accumulated
        schedule = pl_module.schedule
        scaled = f" = {schedule.lr:.3g} × {images:,} / {schedule.lr_base_size}" if schedule.lr_base_size else ""
        steps = int(trainer.estimated_stepping_batches)
        epochs = f"{trainer.max_epochs} epochs, " if trainer.max_steps < 0 else ""
        attention = talking_heads.in_use(pl_module.model, pl_module.device)
        rows = {
            "model": f"{pl_module.name}, {parameters:,} parameters{cost}",
            "data": data.summary(),
            "order": f"{order} by seed {data.seed}{repeats}",
            "decoding": data.how_read(),
            "batch": f"{images:,} = {processes} process{'es' * (processes > 1)} × {data.batch_size} images"
            + (f" × {accumulated} accumulated" if accumulated > 1 else ""),
            "length": f"{epochs}{steps:,} steps; peak learning rate {peak:.3g}{scaled}",
            "device": f"{device}, {trainer.precision}" + (f", {attention} attention" if attention else ""),
        }
        if self.run_dir:
            needed, free = checkpoint_bytes(trainer, pl_module), shutil.disk_usage(self.run_dir).free
            checkpoints = f"; the checkpoints take {size(needed)} of {size(free)} free" if needed else ""
            rows["folder"] = f"{self.run_dir}{checkpoints}"
        return rows

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._last or not trainer.is_global_zero:  # gradients accumulate
            return
        self._last = trainer.global_step
        done = self._last - self._first
        if done == STEPS // 2:
            self._half = time.monotonic()
        elif done == STEPS:
            seconds = (time.monotonic() - self._half) / (STEPS - STEPS // 2)
            left = int(trainer.estimated_stepping_batches) - self._last
            if left > 0:
                print(f"{seconds:.2g} s a step: about {duration(left * seconds)} to go, and validation", flush=True)


def doubts(trainer: Trainer, pl_module: Any, saves_best: bool) -> list[str]:
    """Settings that are probably mistakes, one line each."""
    steps, found = int(trainer.estimated_stepping_batches), []
    batches: float = trainer.num_training_batches
    each = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else steps
    schedule = pl_module.schedule
    warmup = round(schedule.warmup_epochs * each)
    peak = max(group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups)
    if schedule.lr == 0:
        found.append("--model.lr 0 learns nothing")
    elif schedule.min_lr > peak:
        found.append(f"--model.min_lr {schedule.min_lr:g} is above the peak, {peak:.3g}: the learning rate only rises")
    if warmup >= steps:
        found.append(
            f"the warm-up takes {warmup:,} steps (--model.warmup_epochs {schedule.warmup_epochs:g}), "
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


def show(rows: dict[str, str], title: str) -> None:
    """Print the rows in a frame on a terminal, as unwrapped lines in a file or a pipe."""
    console, table = rich.get_console(), Table.grid(padding=(0, 2))  # the console of the bar, which makes room above it
    for name, text in rows.items():
        table.add_row(name, text)
    if console.is_terminal:
        console.print(Panel(table, title=title, title_align="left", expand=False))
    else:
        print(*(f"{name:10}{text}" for name, text in rows.items()), sep="\n", flush=True)


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
    there = sum(path.stat().st_size for path in files if path.is_file())
    return max(0, needed - there - shutil.disk_usage(run_dir).free)


def size(count: int) -> str:
    """Bytes as "1.2 GB"."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 5 s", "3 h 4 min" or "5 d 6 h"."""
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(round(seconds) if unit == "s" else seconds, length)
        parts.append((int(count), unit))
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])

"""What a run prints at its start and at its end: a table of what will run, then its results and what to type next."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cait import plugins
from cait.data.datamodule import ImageNetDataModule
from cait.model import attention, network
from cait.plugins import Run
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.run.clock import Clock, duration
from cait.train.ema import EMA

MEASURED_STEPS = range(10, 20)
"""Steps of a process whose pace gives the estimate of its time. The ones before start workers and choose kernels."""
FILES = 4
"""Checkpoints on the disk at once: last, previous, best, and one that is being written."""
VALUES = 3
"""Numbers of 4 bytes that a checkpoint has for each weight: the weight and AdamW's two moments."""
NAMES = 5
"""Classes that the summary names."""


class Banner(Callback):
    """Print a table of what is going to run when training starts, and an estimate of its time after 20 steps.

    Args:
        data: the data module.
        run_dir: the run's folder; None if nothing is written.
        clock: comes before this one among the callbacks.
    """

    def __init__(self, data: ImageNetDataModule, run_dir: Path | None, clock: Clock) -> None:
        self.data, self.run_dir, self.clock = data, run_dir, clock
        self.gmacs: float | None = None
        """10⁹ multiply-adds of a forward pass on an image; None if they cannot be counted. Process 0 alone counts."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:  # the others print nothing; before the module compiles its blocks
            self.gmacs = forward_gmacs(pl_module.model, network.input_shape(pl_module.hparams))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = self._last_step = trainer.global_step
        if trainer.is_global_zero:
            rows = self._rows(trainer, pl_module)
            show(rows, f"training {self.run_dir.name}" if self.run_dir else "training")

    def _rows(self, trainer: Trainer, pl_module: Any) -> dict[str, str]:
        data, processes, accumulated = self.data, trainer.world_size, trainer.accumulate_grad_batches
        parameters = sum(parameter.numel() for parameter in pl_module.model.parameters())
        cost = f", {self.gmacs:.3g} GMACs an image" if self.gmacs else ""
        order = "shuffled" if data.order.name == "published" else data.order.name
        repeats = f", {data.repeats} times each" if data.repeats > 1 else ""
        device = pl_module.device.type.replace("cuda", "GPU").replace("cpu", "CPU")
        images = data.batch_size * processes * accumulated
        schedule = pl_module.schedule
        scaled = f" = {schedule.lr:.3g} × {images:,} / {schedule.lr_base_size}" if schedule.lr_base_size else ""
        epochs = f"{trainer.max_epochs} epochs, " if trainer.max_steps < 0 else ""
        steps, peak = int(trainer.estimated_stepping_batches), peak_rate(trainer)
        backends = attention.in_use(pl_module.model, pl_module.device)
        rows = {
            "model": f"{pl_module.name}, {parameters:,} parameters{cost}",
            "data": data.summary(),
            "order": f"{order} by seed {data.seed}{repeats}",
            "decoding": data.how_read(),
            "batch": f"{images:,} = {processes} process{'es' * (processes > 1)} × {data.batch_size} images"
            + (f" × {accumulated} accumulated" if accumulated > 1 else ""),
            "length": f"{epochs}{steps:,} steps; peak learning rate {peak:.3g}{scaled}",
            "device": f"{device}, {trainer.precision}" + (f", {backends} attention" if backends else ""),
        }
        if self.run_dir:
            needed, free = checkpoint_bytes(trainer, pl_module), shutil.disk_usage(self.run_dir).free
            checkpoints = f"; the checkpoints take {size(needed)} of {size(free)} free" if needed else ""
            rows["folder"] = f"{self.run_dir}{checkpoints}"
        return rows

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._last_step or not trainer.is_global_zero:  # gradients accumulate
            return
        self._last_step = trainer.global_step
        done = self._last_step - self._first_step
        if done == MEASURED_STEPS.start:
            self._measured_from = self.clock.training
        elif done == MEASURED_STEPS.stop:
            seconds = (self.clock.training - self._measured_from) / len(MEASURED_STEPS)
            left = int(trainer.estimated_stepping_batches) - self._last_step
            if left > 0:
                print(f"{seconds:.2g} s a step: about {duration(left * seconds)} to go, and validation", flush=True)


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next.

    Args:
        run: its folder, the step that it started from, and the program that it was started with.
        clock: comes before this one among the callbacks.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self.run, self.run_dir, self.clock = run, run.folder, clock

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            if (self.run_dir / rundir.CHECKPOINTS / rundir.LAST).exists():
                resume = self.run.program.command("resume", self.run_dir)
                print(f"{how} at step {trainer.global_step:,}; to continue: {resume}", flush=True)
            else:
                print("interrupted before the first checkpoint", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            table = Table.grid(padding=(0, 2))
            for row in [*self._results(trainer, pl_module), ("", ""), *self._commands(trainer)]:
                table.add_row(*row)
            Console().print(Panel(table, title=f"run {self.run_dir.name}", title_align="left", expand=False))

    def _results(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        checkpoints, step = self.run_dir / rundir.CHECKPOINTS, trainer.global_step
        rows = [("trained", f"to step {step:,} in {duration(self.clock.total)}")]
        if step == self.run.first_step:
            rows = [("nothing to do", f"the run had finished its {step:,} steps")]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
                per_cent = callback.metric.split("/")[-1] in ("acc1", "acc5", "acc1_macro")
                score = f"{float(callback.best_model_score):{'.2f' if per_cent else '.4f'}}{' %' * per_cent}"
                rows.append(("best", f"{callback.monitor} {score}   {checkpoints / rundir.BEST}"))
        if missed := never_right(trainer, pl_module):
            rows.append(("never right", missed))
        if (checkpoints / rundir.LAST).exists():
            rows.append(("last", str(checkpoints / rundir.LAST)))
        if (self.run_dir / rundir.METRICS).exists():
            rows.append(("metrics", f"{self.run_dir / rundir.METRICS}, and TensorBoard's events"))
        return rows

    def _commands(self, trainer: Trainer) -> list[tuple[str, str]]:
        command = self.run.program.command
        length, end = ("max_steps", trainer.max_steps) if trainer.max_steps > 0 else ("max_epochs", trainer.max_epochs)
        in_logs = rundir.run_argument(self.run_dir) == self.run_dir.name
        folder = "" if in_logs else f' ARGS="--logdir {self.run_dir.parent}"'
        return [
            ("evaluate", command("eval", self.run_dir)),
            *(row for suggest in plugins.of_kind("suggest") for row in suggest(self.run)),
            ("train longer", command("resume", self.run_dir, f"--trainer.{length} {2 * (end or 0)}")),
            ("watch all runs", f"make tensorboard{folder}"),
        ]


def never_right(trainer: Trainer, pl_module: Any) -> str:
    """The classes that the last validation never got right: their number and the first names; "" for none."""
    counts = pl_module.val_metrics.per_class
    if counts is None or "val/acc1" not in trainer.callback_metrics:  # no validation, or only the check at the start
        return ""
    names: list[str] = trainer.datamodule.class_names  # type: ignore[attr-defined]
    missed = [name for name, (images, correct) in zip(names, counts.tolist(), strict=True) if images and not correct]
    first_names = ", ".join(missed[:NAMES]) + (", ..." if len(missed) > NAMES else "")
    return f"{len(missed)} of {len(names)} classes in the last validation: {first_names}" if missed else ""


def show(rows: dict[str, str], title: str) -> None:
    """Print the rows in a frame on a terminal, as unwrapped lines in a file or a pipe."""
    console, table = rich.get_console(), Table.grid(padding=(0, 2))  # the console of the bar, which makes room above it
    for name, text in rows.items():
        table.add_row(name, text)
    if console.is_terminal:
        console.print(Panel(table, title=title, title_align="left", expand=False))
    else:
        print(*(f"{name:10}{text}" for name, text in rows.items()), sep="\n", flush=True)


def forward_gmacs(model: nn.Module, shape: Sequence[int]) -> float | None:
    """10⁹ multiply-adds of a network's forward pass on an image of `shape`; None if it cannot run without weights.

    A copy without weights runs, so the network stays as it is.
    """
    tensors = [*model.parameters(), *model.buffers()]
    bare: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    bare |= {id(weight): nn.Parameter(bare[id(weight)], requires_grad=False) for weight in model.parameters()}
    try:
        copy = deepcopy(model, bare).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy(torch.empty(1, *shape, device="meta"))
        return counter.get_total_flops() / 2 / 1e9
    except Exception:  # a network of the user's own may do anything
        return None


def peak_rate(trainer: Trainer) -> float:
    """The largest learning rate that the schedule reaches."""
    return max(group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups)


def checkpoint_bytes(trainer: Trainer, pl_module: Any) -> int:
    """What the run's checkpoints take on the disk while one is being written; 0 if it writes none."""
    if not trainer.checkpoint_callbacks:
        return 0
    average = any(isinstance(callback, EMA) and callback.decay for callback in trainer.callbacks)  # type: ignore[attr-defined]
    weights = sum(parameter.numel() for parameter in pl_module.model.parameters())
    return 4 * weights * (VALUES + average) * FILES


def size(count: int) -> str:
    """Bytes as "1.2 GB"."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}"

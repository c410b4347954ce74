"""The table of what is going to run, warnings, and after some steps an estimate of the time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import rich
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn

from cait.data.datamodule import ImageNetDataModule
from cait.errors import console, printable
from cait.extras.clock import Clock, duration
from cait.extras.gmacs import forward_gmacs
from cait.extras.network_name import network_name
from cait.extras.screen.doubts import checkpoint_bytes, doubts
from cait.model import network
from cait.model.attention import SelfAttention
from cait.progress import total_steps
from cait.train.schedule import ScheduleSettings

MEASURED_STEPS = range(10, 20)
"""Steps of a process whose pace gives the estimate of its time. The ones before start workers and choose kernels."""


class Banner(ModelSummary):
    """Print a table of what is going to run and warnings when training starts, and an estimate after 20 steps.

    It takes the place of Lightning's summary of the model.

    Args:
        data: the data module.
        run_dir: the run's folder; None if nothing is written.
        clock: comes before this one among the callbacks.
    """

    def __init__(self, data: ImageNetDataModule, run_dir: Path | None, clock: Clock) -> None:
        super().__init__()
        self.data, self.run_dir, self.clock = data, run_dir, clock

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:  # the others print nothing; before the module compiles its blocks
            self._gmacs = forward_gmacs(pl_module.model, network.input_shape(pl_module.hparams))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's summary would be printed here."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = self._last_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        show(self._rows(trainer, pl_module), f"training {self.run_dir.name}" if self.run_dir else "training")
        for doubt in doubts(trainer, pl_module, self.run_dir):
            screen = console(highlight=False)
            screen.print(f"warning: {doubt}", soft_wrap=not screen.is_terminal)  # on one line in a log

    def _rows(self, trainer: Trainer, pl_module: Any) -> dict[str, str]:
        data, optimizer = self.data, trainer.optimizers[0]
        parameters = sum(parameter.numel() for parameter in pl_module.model.parameters())
        cost = f", {self._gmacs:.3g} GMACs an image" if self._gmacs else ""
        name = network_name(pl_module.name, pl_module.hparams.get("fields"))
        order = "shuffled" if data.order.name == "published" else data.order.name
        repeats = f", {data.repeats} times each" if data.repeats > 1 else ""
        decay = max(group.get("weight_decay", 0) for group in optimizer.param_groups)
        device = pl_module.device.type.replace("cuda", "GPU").replace("cpu", "CPU")
        rows = {
            "model": f"{name}, {parameters:,} parameters{cost}",
            "data": data.summary(),
            "order": f"{order} by seed {data.seed}{repeats}",
            "decoding": data.how_read(),
            "batch": self._batch(trainer),
            "optimizer": f"{pl_module.optimizer_settings.optimizer}, weight decay {decay:g}",
            "length": self._length(trainer, pl_module.schedule),
            "device": f"{device}, {trainer.precision}{attention_in_use(pl_module.model)}",
        }
        if pl_module.schedule.schedule == "constant":
            rows["schedule"] = "constant: the peak to the end"
        if self.run_dir:
            needed, free = checkpoint_bytes(trainer, pl_module), shutil.disk_usage(self.run_dir).free
            checkpoints = f"; the checkpoints take {decimal(needed)} of {decimal(free)} free" if needed else ""
            rows["folder"] = f"{self.run_dir}{checkpoints}"
        return rows

    def _images(self, trainer: Trainer) -> int:
        """Of an optimizer step."""
        return self.data.batch_size * trainer.world_size * trainer.accumulate_grad_batches

    def _batch(self, trainer: Trainer) -> str:
        processes, accumulated = trainer.world_size, trainer.accumulate_grad_batches
        text = f"{self._images(trainer):,} = {processes} process{'es' if processes > 1 else ''}"
        text += f" × {self.data.batch_size} images"
        return text + (f" × {accumulated} accumulated" if accumulated > 1 else "")

    def _length(self, trainer: Trainer, schedule: ScheduleSettings) -> str:
        epochs = f"{trainer.max_epochs} epochs, " if trainer.max_steps < 0 else ""
        groups = trainer.optimizers[0].param_groups
        peak = max(group.get("initial_lr", group["lr"]) for group in groups)
        text = f"{epochs}{int(total_steps(trainer)):,} steps; peak learning rate {peak:.3g}"
        if schedule.lr_base_size is None:
            return text
        return f"{text} = {schedule.lr:.3g} × {self._images(trainer):,} / {schedule.lr_base_size}"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._last_step or not trainer.is_global_zero:  # gradients accumulate
            return
        self._last_step = trainer.global_step
        done = self._last_step - self._first_step
        if done == MEASURED_STEPS.start:
            self._measured_from = self.clock.training
        elif done == MEASURED_STEPS.stop:
            seconds = (self.clock.training - self._measured_from) / len(MEASURED_STEPS)
            left = int(total_steps(trainer)) - self._last_step
            if left > 0:
                print(f"{seconds:.2g} s a step: about {duration(left * seconds)} to go, and validation", flush=True)


def attention_in_use(network: nn.Module) -> str:
    """The backends of attention with talking heads, to put after the device; empty without any."""
    layers = [layer for layer in network.modules() if isinstance(layer, SelfAttention)]
    names = {layer.backend for layer in layers if layer.talking_heads and not layer.cosine}
    return f", {', '.join(sorted(names))} attention" if names else ""


def show(rows: dict[str, str], title: str) -> None:
    """Print the rows in a frame on a terminal, as unwrapped lines in a file or a pipe."""
    console, table = rich.get_console(), Table.grid(padding=(0, 2))  # the console of the bar, which makes room above it
    for name, text in rows.items():
        table.add_row(Text(name), Text(printable(text)))
    if console.is_terminal:
        console.print(Panel(table, title=Text(printable(title)), title_align="left", expand=False))
    else:
        print(*(f"{name:10}{printable(text)}" for name, text in rows.items()), sep="\n", flush=True)

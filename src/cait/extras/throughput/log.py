"""How fast a run is, what share of the device's peak that is, and its memory: throughput.csv and the loggers."""

from __future__ import annotations

import csv
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.loggers import CSVLogger

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras.clock import Clock
from cait.extras.gmacs import ForwardCost

FILE = "throughput.csv"
"""Its name in the run's folder."""
COLUMNS = ("step", "images_per_second", "mfu", "memory_gb")


class ThroughputLog(Callback):
    """Measure every n steps, without waiting for the device. The `Clock` leaves out the time of validation.

    The rows are not in metrics.csv, because that stays the same to the bit in a resumed run. A resumed run appends to
    throughput.csv.

    - images_per_second: of all processes together;
    - mfu: the share of the device's peak in Lightning's table, at 3 forward passes for each image, even if some parts
      are computed twice; empty if the peak is not known;
    - memory_gb: of process 0, in 10⁹ bytes: the peak of torch on the GPU, or of the process in main memory.

    Args:
        data: the data module.
        clock: comes before this one among the callbacks.
        cost: of the network.
        every_n_steps: optimizer steps between two rows; None takes trainer.log_every_n_steps.

    Raises:
        UserError: `every_n_steps` is less than 1.
    """

    def __init__(
        self, data: ImageNetDataModule, clock: Clock, cost: ForwardCost, every_n_steps: int | None = None
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"throughput_every_n_steps must be at least 1 or null, got {every_n_steps}")
        self.data, self.clock, self.cost, self.every_n_steps = data, clock, cost, every_n_steps
        self._gmacs: float | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:  # the others write nothing; before the module compiles its blocks
            self._gmacs = self.cost.of_module(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        self._last_step, self._batches, self._measured = trainer.global_step, 0, 0
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._every = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the peak of this chip is not known
            dtype = _plugin_to_compute_dtype(trainer.precision_plugin)
            peak = get_available_flops(trainer.strategy.root_device, dtype)
        self._throughput = Throughput(available_flops=peak, world_size=trainer.world_size, window_size=2)
        self._path = Path(trainer.default_root_dir) / FILE
        self._update()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batches += 1
        if trainer.global_step == self._last_step:  # gradients accumulate
            return
        self._last_step = trainer.global_step
        if self._every and self._last_step % self._every == 0:
            self._update()
            self._write(trainer, self._throughput.compute())

    def _update(self) -> None:
        images = self._batches * self.data.batch_size
        flops = None if self._gmacs is None else int(6e9 * self._gmacs * (images - self._measured))
        self._throughput.update(time=self.clock.training, batches=self._batches, samples=images, flops=flops)
        self._measured = images

    def _write(self, trainer: Trainer, measured: Any) -> None:
        speed = measured["device/samples_per_sec"] * trainer.world_size
        values = {COLUMNS[1]: speed, COLUMNS[2]: measured.get("device/mfu"), COLUMNS[3]: _memory(trainer) / 1e9}
        known = {name: float(f"{value:.5g}") for name, value in values.items() if value is not None}
        new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow({"step": self._last_step - 1, **known})  # as metrics.csv counts them
        for logger in trainer.loggers:
            if not isinstance(logger, CSVLogger):
                logger.log_metrics({f"throughput/{name}": value for name, value in known.items()}, self._last_step - 1)


def _memory(trainer: Trainer) -> int:
    """Peak memory in bytes, of the GPU if the run is on one."""
    if trainer.strategy.root_device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most

"""What makes a run fast on the CPU."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cait.data.datamodule import ImageNetDataModule
from cait.run import cpu

SMALL = 2**17
"""With up to this many numbers in the tokens of a batch one thread is faster (benchmarks/small_step.md)."""


class CPUSettings(Callback):
    """oneDNN where it is faster than MKL, and one thread for a small network unless OMP_NUM_THREADS says how many.

    Waking a thread takes about as long as an operation on so few numbers. Threads that spin instead of sleeping
    wait for each other when another job runs. One thread is about as fast alone, and stays so beside other jobs.

    Args:
        data: says how many images a process takes at a time.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._given = "OMP_NUM_THREADS" in os.environ  # Lightning sets it later if it starts processes
        self._changes = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device, network = trainer.strategy.root_device, getattr(pl_module, "model", None)
        self._changes.enter_context(cpu.fast_matmul(network, device))
        positions = cpu.positions(network)
        if device.type != "cpu" or self._given or positions is None:
            return
        if self.data.batch_size * positions.numel() <= SMALL:
            self._changes.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._changes.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._changes.close()  # Lightning calls no teardown

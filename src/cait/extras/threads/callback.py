"""One thread for a small network on the CPU."""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cait.data.datamodule import ImageNetDataModule

SMALL = 2**17
"""With up to this many numbers in the tokens of a batch one thread is faster (benchmarks/results.md)."""


class CPUThreads(Callback):
    """One thread for a small network on the CPU, unless OMP_NUM_THREADS says how many.

    Waking a thread takes about as long as an operation on so few numbers. Threads that spin instead of sleeping
    wait for each other when another job runs. One thread is about as fast alone, and stays so beside other jobs.

    Args:
        data: says how many images a process takes at a time.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._given = "OMP_NUM_THREADS" in os.environ  # Lightning sets it later if it starts processes
        self._before: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        positions = getattr(getattr(pl_module, "model", None), "pos_embed", None)  # [1, N, D]
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if not on_cpu or self._given or not isinstance(positions, Tensor):
            return
        if self.data.batch_size * positions.numel() <= SMALL:
            self._before = torch.get_num_threads()
            torch.set_num_threads(1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning calls none

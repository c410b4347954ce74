"""What makes training fast on the CPU."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cait.cpu import fast_matmul
from cait.datamodule import ImageNetDataModule

SMALL = 2**17
"""With up to this many numbers in the tokens of a batch one thread is faster (benchmarks/small_step.md)."""

WIDE = 64
"""oneDNN is slower than MKL on narrower networks (benchmarks/onednn.md)."""


class CPUSettings(Callback):
    """Fast matrix products on AMD processors, and one thread for a small network unless OMP_NUM_THREADS says how many.

    Waking a thread takes about as long as an operation on so few numbers. Threads that spin instead of sleeping
    wait for each other when another job runs. One thread is about as fast alone, and stays so beside other jobs.

    Args:
        data: says how many images a process takes at a time.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._given = "OMP_NUM_THREADS" in os.environ  # Lightning sets it later if it starts processes
        self._until_teardown = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        positions = getattr(getattr(pl_module, "model", None), "pos_embed", None)  # [1, N, D]
        if positions is None or positions.shape[-1] >= WIDE:
            self._until_teardown.enter_context(fast_matmul(device))
        if device.type != "cpu" or self._given or positions is None:
            return
        if self.data.batch_size * positions.numel() <= SMALL:
            self._until_teardown.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._until_teardown.close()

"""One thread for a small network on the CPU."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cait.data.datamodule import ImageNetDataModule

SMALL = 2**17
"""With up to this many numbers in the tokens of a batch one thread is faster (benchmarks/results.md)."""


class CPUThreads(Callback):
    """One thread for a small network on the CPU, because waking others takes as long as an operation.

    A number in OMP_NUM_THREADS is kept.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        # Lightning sets it later if it starts processes
        self._is_given = "OMP_NUM_THREADS" in os.environ

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._before = torch.get_num_threads()
        positions = getattr(getattr(pl_module, "model", None), "pos_embed", None)  # [1, N, D]
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if not on_cpu or self._is_given or not isinstance(positions, Tensor):
            return
        if self.data.batch_size * positions.numel() <= SMALL:
            torch.set_num_threads(1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.set_num_threads(self._before)

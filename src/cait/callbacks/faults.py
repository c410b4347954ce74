"""What became of the pictures that could not be read, said once an epoch."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cait.datamodule import ImageNetDataModule


class FaultReport(Callback):
    """After each epoch count the unreadable pictures of all processes; the run ends where they are too many."""

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._told = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        count = self.data.faults.check()
        if count > self._told and trainer.is_global_zero:
            self._told = count
            print(f"{count} pictures cannot be read, others stand in for them: {self.data.faults.path}", flush=True)

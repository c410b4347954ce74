"""Images that cannot be read end a run when there are too many."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.data.datamodule import ImageNetDataModule


class UnreadableReport(Callback):
    """After each epoch, count the unreadable images of all processes; too many end the run."""

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._reported = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        count = self.data.unreadable.check()
        if count > self._reported and trainer.is_global_zero:
            self._reported = count
            print(f"{count} images cannot be read, others stand in for them: {self.data.unreadable.path}", flush=True)

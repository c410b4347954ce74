"""How long the training steps wait for images."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.data.cores import share
from cait.data.datamodule import ImageNetDataModule

STARVED = 0.1
"""Share of the time above which waiting deserves a hint."""
SECONDS = 10.0
"""Shorter epochs are mostly the start of the workers."""


class DataWait(Callback):
    """Measure how long the steps of each epoch wait for images; `line` says so. If it is long, print once what helps.

    Args:
        data: the data module.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self.line = ""
        self._hinted = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # a run resumed within an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = self._end = time.monotonic()
        self._before = self._waited(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self._end = time.monotonic()  # validation follows the last one

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        seconds, waited = self._end - self._begin, self._waited(trainer) - self._before
        share = waited / seconds if seconds > 0 else 0.0
        self.line = f"waited {waited:.1f} s of {seconds:.1f} s for images ({share:.0%})"
        if share > STARVED and seconds > SECONDS and not self._hinted:
            self._hinted = True
            print(
                f"The steps wait for images: {advice(self.data, trainer.num_devices, trainer.world_size)}", flush=True
            )

    @staticmethod
    def _waited(trainer: Trainer) -> float:
        return getattr(trainer.train_dataloader, "waited", 0.0)


def advice(data: ImageNetDataModule, processes: int, world_size: int) -> str:
    """What would make images arrive sooner, the cheapest first. `processes` is their number on this node."""
    workers, cores = data.workers(processes), share(processes)
    if workers < cores:
        return f"each process has {cores} cores and num_workers is {workers}; try --data.num_workers {cores}"
    if data.backend in ("torchvision", "pillow"):
        return "nvidia-nvimgcodec-cu13 decodes faster, with the same pixels"
    if data.backend == "timm":
        return "--data.backend auto is about twice as fast as timm's own transform"
    if data.repeats > 1 and world_size > 1 and not data.decode_once:
        return "--data.decode_once true decodes an image once for all its repeats"
    return f"all {cores} cores of each process are at work; smaller files or more cores would help"

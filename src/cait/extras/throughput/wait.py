"""What would help when the training steps wait for images."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.cores import share
from cait.data.datamodule import ImageNetDataModule
from cait.extras.clock import Clock

STARVED = 0.1
"""Share of an epoch's time above which waiting deserves a hint."""
SECONDS = 10.0
"""Shorter epochs are mostly the start of the workers."""


class WaitHint(Callback):
    """If the steps of an epoch wait long for images, print once what helps.

    Args:
        data: the data module.
        clock: comes before this one among the callbacks.
    """

    def __init__(self, data: ImageNetDataModule, clock: Clock) -> None:
        self.data, self.clock = data, clock
        self._hinted = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._hinted or not trainer.is_global_zero:
            return
        waited, seconds = self.clock.waiting(trainer)
        if seconds > SECONDS and waited > STARVED * seconds:
            self._hinted = True
            remedy = advice(self.data, trainer.num_devices, trainer.world_size)
            print(f"The steps wait for images: {remedy}", flush=True)


def advice(data: ImageNetDataModule, processes: int, world_size: int) -> str:
    """What would make images arrive sooner, the cheapest first. `processes` is their number on this node."""
    workers, cores = data.workers(processes), share(processes)
    if workers < cores:
        return f"each process has {cores} cores and num_workers is {workers}; try --data.num_workers {cores}"
    if data.pipeline and data.pipeline.backend in ("torchvision", "pillow"):
        return "nvidia-nvimgcodec-cu13 decodes faster, with the same pixels"
    if data.loading.backend == "timm":
        return "--data.backend auto is about twice as fast as timm's own transform"
    if data.repeats > 1 and world_size > 1 and not data.decode_once:
        return "--data.decode_once true decodes an image once for all its repeats"
    return f"all {cores} cores of each process are at work; smaller files or more cores would help"

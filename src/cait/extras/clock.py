"""How long steps, validations and the wait for images take."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Clock(Callback):
    """Measure the training of this process. The callbacks that read it come after it."""

    def __init__(self) -> None:
        self._validations = 0.0  # seconds of all
        self._fit_start = self._epoch_start = self._batch_end = time.monotonic()
        self._waited_before = 0.0
        self.validated = False
        """Whether the running epoch has been validated, in this process."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_start = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out in a run resumed within an epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = self._batch_end = time.monotonic()
        self._waited_before = _waited(trainer)
        self.validated = False

    def on_train_batch_end(self, *_: Any) -> None:
        self._batch_end = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validations += time.monotonic() - self._validation_start
            self.validated = True

    @property
    def training(self) -> float:
        """When the last batch ended, in seconds, with all validations taken out; the zero point means nothing."""
        return self._batch_end - self._validations

    @property
    def epoch(self) -> float:
        """Seconds since the epoch began in this process."""
        return time.monotonic() - self._epoch_start

    @property
    def total(self) -> float:
        """Seconds since `fit` began."""
        return time.monotonic() - self._fit_start

    def waiting(self, trainer: Trainer) -> tuple[float, float]:
        """(seconds that this epoch's steps have waited for images, seconds from its start to its last step)"""
        return _waited(trainer) - self._waited_before, self._batch_end - self._epoch_start


def _waited(trainer: Trainer) -> float:
    """Seconds that training has waited for batches so far; a loader of your own may not say."""
    return getattr(trainer.train_dataloader, "waited", 0.0)


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 5 s", "3 h 4 min" or "5 d 6 h"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

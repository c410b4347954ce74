"""How long steps, validations and the wait for images take."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.progress import total_steps


class Clock(Callback):
    """Measure the training of this process. The callbacks that read it come after it."""

    def __init__(self) -> None:
        self._validation = self._validations = 0.0  # seconds of the last, and of all
        self._steady, self._steady_batches = 0.0, 0
        self._fit_start = self._epoch_start = self._batch_end = time.monotonic()
        self._previous_end: float | None = None
        self._waited_before = 0.0
        self.validated = False
        """Whether the running epoch has been validated, in this process."""

    @classmethod
    def of(cls, trainer: Trainer) -> Clock | None:
        """The clock among the Trainer's callbacks; None if there is none."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, cls)), None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_start = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = total_steps(trainer)
        self._previous_end = None
        self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out in a run resumed within an epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = self._batch_end = time.monotonic()
        self._waited_before = _waited(trainer)
        self.validated = False

    def on_train_batch_end(self, *_: Any) -> None:
        self._batch_end = time.monotonic()
        if self._previous_end is not None:  # the first step of a process and one after a validation are not typical
            self._steady += self._batch_end - self._previous_end
            self._steady_batches += 1
        self._previous_end = self._batch_end

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validation = time.monotonic() - self._validation_start
            self._validations += self._validation
            self.validated = True
        self._previous_end = None

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

    def left(self, trainer: Trainer) -> float | None:
        """Seconds until the run's end, validations included, at the pace so far; None before two steps are done."""
        if not self._steady_batches:
            return None
        batches = (self._steps - trainer.global_step) * trainer.accumulate_grad_batches
        steps = batches * self._steady / self._steady_batches
        return steps + self._validation * _validations_within(trainer, batches)


def _waited(trainer: Trainer) -> float:
    """Seconds that training has waited for batches so far; a loader of your own may not say."""
    return getattr(trainer.train_dataloader, "waited", 0.0)


def _validations_within(trainer: Trainer, batches: float) -> int:
    """How many validations come in so many batches."""
    every: Any = trainer.val_check_batch
    if not trainer.enable_validation or not math.isfinite(every):
        return 0
    epochs = trainer.check_val_every_n_epoch or 1 if every >= trainer.num_training_batches else 1
    return math.ceil(batches / (every * epochs))


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 5 s", "3 h 4 min" or "5 d 6 h"."""
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(round(seconds) if unit == "s" else seconds, length)
        parts.append((int(count), unit))
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def countdown(seconds: float) -> str:
    """Seconds as "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

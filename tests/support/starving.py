"""Steps that wait for images, by a clock that goes on only when someone sleeps."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cait.data.loader import Loader


class Time:
    """Stands where `time` does, and goes on only when someone sleeps: how fast the machine is does not matter."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Busy(LightningModule):
    """Steps that take some time each."""

    def __init__(self, clock: Time, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor) -> Tensor:
        self.clock.sleep(self.seconds)
        return (self.weight * batch.sum()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Slow(list):
    """Items that take some time each."""

    def __getitem__(self, index: Any) -> Any:
        self.clock.sleep(self.seconds)
        return super().__getitem__(index)


def train_starving(clock: Time, step: float, item: float, *callbacks: Callback) -> None:
    """Train two epochs of ten steps; a step and a batch take so many seconds."""
    items = Slow(torch.zeros(10, 1))
    items.clock, items.seconds = clock, item
    settings: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[*callbacks], enable_model_summary=False, **settings)
    trainer.fit(Busy(clock, step), Loader(items, batch_size=None))

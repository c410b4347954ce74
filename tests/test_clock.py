"""The clock that extras share: the time left, and times in words."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from modules import loader, module, trainer

from cait.extras import clock
from cait.extras.clock import Clock, countdown, duration


def test_the_time_left_counts_steps_and_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of three steps of two batches, 2 s each, and a validation of 10 s after each."""

    class Time(Callback):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def on_train_batch_start(self, *_: Any) -> None:
            self.now += 2

        def on_validation_batch_start(self, *_: Any) -> None:
            self.now += 5

    told = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            told.append(Clock.of(trainer).left(trainer))

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                told.append(("validated", Clock.of(trainer).left(trainer)))

    time = Time()
    monkeypatch.setattr(clock, "time", time)
    fit = trainer(callbacks=[time, Clock(), Spy()], accumulate_grad_batches=2, num_sanity_val_steps=1)
    fit.fit(module(), loader(24, 4), loader(8, 4))
    first = [None, 10 * 2, 10 * 2, 8 * 2, 8 * 2, 6 * 2, ("validated", 6 * 2 + 10)]  # no validation is known yet
    second = [6 * 2 + 10, 4 * 2 + 10, 4 * 2 + 10, 2 * 2 + 10, 2 * 2 + 10, 0, ("validated", 0)]
    assert told == first + second
    assert [countdown(seconds) for seconds in (5, 3599.6, 130 * 3600)] == ["0:00:05", "1:00:00", "130:00:00"]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.2, 59, 125, 3 * 3600 + 240, 9 * 86400 + 3600)] == [
        *("0 s", "59 s", "2 min 5 s", "3 h 4 min", "9 d 1 h")
    ]

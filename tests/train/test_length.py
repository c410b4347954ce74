"""The schedule of a run whose epochs change their length: down to `min_lr` at its true last step, and never up."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import slow
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from modules import loader, module, trainer

from cait.loops import Position, total_steps

PEAK, LOW, WARMUP_LR, WARMUP = 1e-2, 1e-4, 1e-6, 3


class Rates(Callback):
    """The rate of every step, and the run's length as its beginning has it; stops after so many batches."""

    def __init__(self, stop: float = math.inf) -> None:
        self.stop, self.rates, self.planned = stop, [], 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.planned, self.start = total_steps(trainer), Position.now(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self.stop


def leg(
    path: Path, batches: int, stop: float = math.inf, start: bool = False, **settings: Any
) -> Rates:
    rates, others = Rates(stop), settings.pop("callbacks", [])
    fit = trainer(callbacks=[rates, *others], **dict(max_epochs=4) | settings)
    net = module(lr=PEAK, min_lr=LOW, warmup_epochs=0.5)
    fit.fit(net, loader(4 * batches), ckpt_path=path if start else None)
    fit.save_checkpoint(path)
    rates.last = fit.optimizers[0].param_groups[0]["lr"]
    return rates


def cosine(share: float) -> float:
    return LOW + (PEAK - LOW) * (1 + math.cos(math.pi * share)) / 2


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "fewer batches": lambda: dict(batches=2),
    "more batches": lambda: dict(batches=15),
    "a limit": lambda: dict(limit_train_batches=3),
    "a share": lambda: dict(limit_train_batches=0.5),
    "accumulation": lambda: dict(accumulate_grad_batches=4),
    "accumulation by epoch": lambda: dict(callbacks=[GradientAccumulationScheduler({0: 1, 3: 3})]),
}


# amid an epoch, and at the end of one
@pytest.mark.parametrize(
    ("change", "stop"),
    [
        ("nothing", 14),
        ("fewer batches", 12),
        *slow(("nothing", 12), *((change, 14) for change in CHANGES if change != "nothing")),
    ],
)
def test_the_fall_goes_on_from_where_it_stands(change: str, stop: int, tmp_path: Path) -> None:
    path, settings = tmp_path / "x.ckpt", dict(batches=6) | CHANGES[change]()
    before = leg(path, 6, stop)
    after = leg(path, start=True, **settings)
    done, rest = len(before.rates), len(after.rates)
    assert (done, before.planned) == (stop, 24)
    assert after.planned == done + rest
    reached = (done - WARMUP) / (24 - WARMUP)
    expected = [cosine(reached + (1 - reached) * step / rest) for step in range(rest)]
    assert after.rates == pytest.approx(expected, rel=1e-9)
    assert after.last == pytest.approx(LOW)


def test_a_warm_up_that_is_not_over_takes_the_length_of_now(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    leg(path, 6, 2)
    rates, rise = leg(path, 12, start=True).rates, (PEAK - WARMUP_LR) / (2 * WARMUP - 1)
    assert rates[:4] == pytest.approx([WARMUP_LR + rise * step for step in range(2, 6)])
    assert leg(path, 12, start=True).rates == []  # the run is over


@pytest.mark.parametrize("limits", [dict(max_epochs=7), dict(max_steps=20)])
@pytest.mark.parametrize("batches", [3, 10])
def test_another_end_gives_the_cosine_to_that_end(
    batches: int, limits: dict, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    done = len(leg(path, 6, 14).rates)
    after = leg(path, batches, start=True, **limits)
    end = done + len(after.rates)
    assert after.planned == end
    assert after.rates == pytest.approx(
        [cosine((step - WARMUP) / (end - WARMUP)) for step in range(done, end)]
    )
    assert after.last == pytest.approx(LOW)


def test_accumulation_that_changes_by_epoch_is_counted_from_the_start(tmp_path: Path) -> None:
    rates = leg(
        tmp_path / "x.ckpt", 6, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]
    )
    assert rates.planned == len(rates.rates) == 6 + 3 + 2 + 2
    assert rates.rates[WARMUP:] == pytest.approx(
        [cosine((step - WARMUP) / 10) for step in range(WARMUP, 13)]
    )


@pytest.mark.parametrize(("epochs", "batches", "step"), [(0, 0, 0), (1, 0, 6), (1, 2, 8)])
def test_a_position_is_the_same_while_training_and_in_the_checkpoint(
    epochs: int, batches: int, step: int, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    leg(path, 6, 6 * epochs + batches or 1)
    assert leg(path, 6, start=True).start == ((epochs, batches, step) if step else (0, 1, 1))

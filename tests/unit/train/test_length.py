"""The schedule of a run whose epochs change their length: down to `min_lr` at its true last step, and never up."""

import math

import pytest
from harness import over_table
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from modules import loader, module, trainer

from cait.loops import total_steps

PEAK, LOW, WARMUP_LR, WARMUP = 1e-2, 1e-4, 1e-6, 3


class Rates(Callback):
    """Notes the rate of every step, and the run's length at its beginning; stops after some batches."""

    def __init__(self, stop=math.inf):
        self.stop = stop
        self.rates = []

    def on_train_start(self, trainer, *_):
        self.planned = total_steps(trainer)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *_):
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        trainer.should_stop |= batches >= self.stop


def train(path, stop=math.inf, batches=6, accumulation=None, **settings):
    """Train on epochs of so many batches, from the checkpoint at `path` if there is one, and save there."""
    rates = Rates(stop)
    callbacks = [rates, GradientAccumulationScheduler(accumulation or {0: 1})]
    fit = trainer(callbacks=callbacks, **{"max_epochs": 4} | settings)
    net = module(lr=PEAK, min_lr=LOW, warmup_epochs=0.5)
    fit.fit(net, loader(4 * batches), ckpt_path=path if path.exists() else None)
    fit.save_checkpoint(path)
    rates.last = fit.optimizers[0].param_groups[0]["lr"]
    return rates


def cosine(share):
    """The rate after this share of the fall."""
    return LOW + (PEAK - LOW) * (1 + math.cos(math.pi * share)) / 2


@over_table(__file__, "changes", batches=6, accumulation=None, settings={})
def test_the_fall_goes_on_from_where_it_stands(stop, batches, accumulation, settings, tmp_path):
    """Or, with another limit, on the cosine to that end."""
    before = train(tmp_path / "x.ckpt", stop)
    after = train(tmp_path / "x.ckpt", batches=batches, accumulation=accumulation, **settings)
    rest = len(after.rates)
    assert (len(before.rates), before.planned) == (stop, 24)
    assert after.planned == stop + rest
    total = after.planned if settings.keys() & {"max_epochs", "max_steps"} else 24
    share = (stop - WARMUP) / (total - WARMUP)
    expected = [cosine(share + (1 - share) * step / rest) for step in range(rest)]
    assert after.rates == pytest.approx(expected, rel=1e-9)
    assert after.last == pytest.approx(LOW)


def test_a_warm_up_that_is_not_over_takes_the_length_of_now(tmp_path):
    train(tmp_path / "x.ckpt", stop=2)
    rates = train(tmp_path / "x.ckpt", batches=12).rates
    rise = (PEAK - WARMUP_LR) / (2 * WARMUP - 1)
    assert rates[:4] == pytest.approx([WARMUP_LR + rise * step for step in range(2, 6)])
    assert train(tmp_path / "x.ckpt", batches=12).rates == []  # the run is over


def test_accumulation_that_changes_by_epoch_is_counted_from_the_start(tmp_path):
    rates = train(tmp_path / "x.ckpt", accumulation={0: 1, 1: 2, 2: 4})
    assert rates.planned == len(rates.rates) == 6 + 3 + 2 + 2
    expected = [cosine(step / 10) for step in range(10)]
    assert rates.rates[WARMUP:] == pytest.approx(expected)


def test_a_second_fit_goes_on_at_the_step_where_the_trainer_stands():
    rates = Rates()
    fit = trainer(max_epochs=1, callbacks=[rates])
    net = module(lr=PEAK, min_lr=LOW, warmup_epochs=0)
    fit.fit(net, loader())
    fit.fit_loop.max_epochs = 3
    fit.fit(net, loader())
    first = [cosine(step / 6) for step in range(6)]
    second = [cosine(step / 18) for step in range(6, 18)]
    assert rates.rates == pytest.approx(first + second, rel=1e-12)

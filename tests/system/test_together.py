"""Several processes are one run: they stop at the same step and have the same numbers.

That they go on to the same bits is rows of tests/law/test_exact.yaml.
"""

import os
import warnings
from functools import partial

import gloo
import pytest
import torch
from harness import beside, over_table, shared
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from modules import loader, module, trainer
from torch import Tensor, nn
from torchmetrics import Metric

from cait.cli import noise
from cait.run import signals
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import StepSeed
from cait.train.metrics import EvalMetrics
from cait.train.module import CaiTModule

EPOCH = 6
"""Batches, and so steps, of an epoch."""
CLASSES = 6
"""So many have a top-5 accuracy."""
TABLE = beside(__file__)


def fitted(folder, *callbacks, net=None, **settings):
    """A Trainer of two processes that has trained, at most 4 epochs."""
    fit = trainer(
        signals.Trainer,
        devices=2,
        strategy="ddp",
        max_epochs=4,
        use_distributed_sampler=False,
        callbacks=[LastCheckpoint(folder), *callbacks],
        plugins=[DurableCheckpointIO()],
        **settings,
    )
    fit.callbacks.append(signals.StopTogether())
    fit.fit(net or module(warmup_epochs=0), loader(4 * EPOCH), loader(8))
    return fit


# One process asks for a stop


class StopsByItself(CaiTModule):
    """One process's own hook stops, after those of all callbacks."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            self.trainer.should_stop = True


def own_hook(rank, folder):
    return fitted(folder, net=module(StopsByItself, warmup_epochs=0)).global_step


def early_stopping(rank, folder):
    return fitted(folder, EarlyStopping("val/loss", patience=1, min_delta=99.0)).global_step


def stop_in(hook, step):
    """One process alone asks for a stop in a hook, once so many steps are done. Returns how many are done then."""

    def situation(rank, folder):
        def ask(fit, *_):
            if rank == 1 and fit.global_step >= step and not fit.sanity_checking:
                fit.should_stop = True

        return fitted(folder, LambdaCallback(**{hook: ask})).global_step

    return situation


# What each process has of its own


class Norms(nn.Module):
    """Statistics that follow the last batch."""

    def __init__(self, img_size, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.9)
        self.head = nn.Linear(3, num_classes)

    def forward(self, images):
        return self.head(self.norm(images).mean(dim=(2, 3)))


def norms(rank, folder):
    """The statistics of each validation, some of them amid an accumulation."""
    seen = []

    def look(fit, net):
        seen.append(float(net.model.norm.running_mean.sum()))

    def change(fit, net, batch, index):
        batch[0].add_(rank)

    net = module(name="test_together:Norms", fields=None, drop_path_rate=None, warmup_epochs=0)
    callback = LambdaCallback(on_validation_end=look, on_train_batch_start=change)
    limits = dict(accumulate_grad_batches=4, val_check_interval=3, max_steps=2)
    fitted(folder, callback, net=net, **limits)
    return seen


def draws(rank, folder):
    """What a process draws in its steps."""
    drawn = []
    draw = LambdaCallback(on_train_batch_start=lambda *_: drawn.append(float(torch.rand(()))))
    fitted(folder, StepSeed(0), draw, max_steps=3)
    return drawn


def logged(rank, folder):
    """What Lightning warns of where the run logs, and where a callback does."""
    mine = LambdaCallback(on_validation_epoch_end=lambda fit, net: net.log("mine", float(rank)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fitted(folder, mine, max_steps=2)
    lines = [str(warning.message) for warning in warned]
    return [line.split("'")[1] for line in lines if "recommended to use `self.log" in line]


# Metrics


class Shares(Metric):
    """The share of right answers, of lists that torchmetrics gathers as they are."""

    hits: list[Tensor]

    def __init__(self, num_classes):
        super().__init__()
        self.add_state("hits", [], dist_reduce_fx=None)

    def update(self, logits, labels):
        self.hits.append((logits.argmax(dim=1) == labels).float())

    def compute(self):
        return torch.cat(self.hits).mean()


class Own(Metric):
    """Each process has a number of its own."""

    def __init__(self, num_classes):
        super().__init__()
        self.number = float(os.environ.get("LOCAL_RANK", 0))

    def update(self, logits, labels):
        pass

    def compute(self):
        return self.number


METRICS = {
    "auroc": "torchmetrics.classification:MulticlassAUROC",
    "lists": "test_together:Shares",
    "own": "test_together:Own",
}


def metrics_of(batches):
    """What metrics say of batches, the second time."""
    metrics = EvalMetrics(CLASSES, METRICS)
    for _ in range(2):
        for labels in batches:
            generator = torch.Generator().manual_seed(len(labels))
            metrics.update(
                torch.randn(len(labels), CLASSES, generator=generator), torch.tensor(labels)
            )
        figures = metrics.compute("val")
    return {name: f"{float(value):.5f}" for name, value in figures.items()}


def of_its_share(row):
    return lambda rank, folder: metrics_of(row["shares"][rank])


TWO = {
    "logged": logged,  # first: Lightning warns once
    "norms": norms,
    "draws": draws,
    "the module's own hook": own_hook,
    "early stopping": early_stopping,
}
for case, (hook, step) in TABLE["hooks"].items():
    TWO[case] = stop_in(hook, step)
for row in TABLE["shares"]:
    TWO[row["case"]] = of_its_share(row)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    run = partial(gloo.run, __file__, "TWO", 2)
    return gloo.answers(shared(tmp_path_factory, "two", run))


@over_table(__file__, "stops")
def test_what_one_process_asks_for_stops_both_at_the_same_step(case, least, most, together):
    first, second = together[case]
    assert first == second
    assert least <= first <= most


@over_table(__file__, "shares")
def test_both_processes_have_the_metrics_of_all_images(case, shares, together):
    first, second = shares
    whole = metrics_of(first + second)
    assert together[case] == [whole, whole]
    assert 0 < float(whole["val/acc5"]) < 100
    assert (whole["val/auroc"] == "nan") == (case == "a class has no image")


def test_a_validation_amid_an_accumulation_takes_the_statistics_that_are_saved(together):
    first, second = together["norms"]
    assert first == second
    assert len({*first}) > 2


def test_each_process_and_each_step_draws_its_own(together):
    first, second = together["draws"]
    assert len(first) == len(second) == 3
    assert len({*first, *second}) == 6


def test_lightning_warns_of_what_a_callback_logs_for_one_process_alone(together):
    assert together["logged"] == [["mine"], []]  # only the first process warns
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        noise.hide()
        line = "It is recommended to use `self.log('mine', ..., sync_dist=True)`"
        warnings.warn(line, stacklevel=1)
    assert warned

"""Several processes are one run: they stop at the same step, have the same numbers, and go on to the same bits."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import yaml
from harness import table
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from modules import FIELDS, images_in, loader, module, trainer
from own_parts import Net
from same import same
from torch import Tensor, nn
from torchmetrics import Metric

from cait.cli import noise
from cait.run import signals
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import EMA, StepSeed
from cait.train.metrics import EvalMetrics
from cait.train.module import CaiTModule

EPOCH = 16
"""Batches, and so steps, of an epoch."""
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def fitted(folder, *callbacks, net=None, **settings):
    """A Trainer of two processes that has trained, at most 3 epochs."""
    fit = signals.Trainer(
        devices=2,
        strategy="ddp",
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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

    def on_train_batch_end(self, *_: Any):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            self.trainer.should_stop = True


def own_hook(rank, folder):
    settings = module().hparams | {"warmup_epochs": 0}
    return fitted(folder, net=StopsByItself(**settings)).global_step


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

    def __init__(self, img_size: int, num_classes: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.9)
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(images).mean(dim=(2, 3)))


def norms(rank, folder):
    """The statistics of each validation, some of them amid an accumulation."""
    seen: list[float] = []

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
    drawn: list[float] = []
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

    def __init__(self, num_classes: int):
        super().__init__()
        self.add_state("hits", [], dist_reduce_fx=None)

    def update(self, logits: Tensor, labels: Tensor):
        self.hits.append((logits.argmax(dim=1) == labels).float())

    def compute(self) -> Tensor:
        return torch.cat(self.hits).mean()


class Own(Metric):
    """Each process has a number of its own."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.number = float(os.environ.get("LOCAL_RANK", 0))

    def update(self, logits: Tensor, labels: Tensor):
        pass

    def compute(self) -> float:
        return self.number


METRICS = {
    "auroc": "torchmetrics.classification:MulticlassAUROC",
    "lists": "test_together:Shares",
    "own": "test_together:Own",
}


def metrics_of(batches):
    """What metrics say of batches, the second time."""
    metrics = EvalMetrics(3, METRICS)
    for _ in range(2):
        for labels in batches:
            generator = torch.Generator().manual_seed(len(labels))
            metrics.update(torch.randn(len(labels), 3, generator=generator), torch.tensor(labels))
        figures = metrics.compute("val")
    return {name: f"{float(value):.5f}" for name, value in figures.items()}


def of_its_share(share):
    return lambda rank, folder: metrics_of(share["second" if rank else "first"])


TWO: dict[str, Callable[[int, Path], Any]] = {
    "logged": logged,  # first: Lightning warns once
    "norms": norms,
    "draws": draws,
    "the module's own hook": own_hook,
    "early stopping": early_stopping,
}
for row in TABLE["stops"]:
    if "hook" in row:
        TWO[row["case"]] = stop_in(row["hook"], row["step"])
for row in TABLE["shares"]:
    TWO[row["case"]] = of_its_share(row)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return gloo.answers(__file__, "TWO", tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("row", table(__file__, "stops"))
def test_what_one_process_asks_for_stops_both_at_the_same_step(row, together):
    first, second = together[row["case"]]
    assert first == second
    assert row["from"] <= first <= row["to"]


@pytest.mark.parametrize("row", table(__file__, "shares"))
def test_both_processes_have_the_metrics_of_all_images(row, together):
    whole = metrics_of(row["first"] + row["second"])
    assert together[row["case"]] == [whole, whole]
    assert (whole["val/auroc"] == "nan") == (row["case"] == "a class has no image")


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
        noise.hide()
        line = "It is recommended to use `self.log('mine', ..., sync_dist=True)`"
        warnings.warn(line, stacklevel=1)
    assert warned


# Three processes, stopped and resumed


class Branches(nn.Module):
    """Each process takes one of two ways in each step, at random."""

    def __init__(self, img_size: int, num_classes: int):
        super().__init__()
        self.ways = nn.ModuleList(Net(img_size, num_classes) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        way = int(torch.rand(()) < 0.5) if self.training else 0
        return self.ways[way](images)


def resumed(net, ddp, accumulated=1):
    """Train whole/last.ckpt, and stopped/last.ckpt in two parts."""

    def train(folder, steps, start):
        torch.manual_seed(0)
        fit = trainer(
            devices=3,
            strategy=DDPStrategy(**ddp),
            use_distributed_sampler=False,
            max_steps=steps,
            limit_train_batches=12,
            limit_val_batches=1,
            accumulate_grad_batches=accumulated,
            callbacks=[LastCheckpoint(folder), StepSeed(0), EMA(0.9)],
            plugins=[DurableCheckpointIO()],
        )
        flat = dict(lr=1e-2, schedule="constant", warmup_epochs=0, drop_path_rate=0.2)
        digits = folder.parents[1] / "digits"
        data = images_in(digits, img_size=8, batch_size=12, cutmix=0.0)
        fit.fit(module(**flat | dict(num_classes=10) | net), datamodule=data, ckpt_path=start)
        fit.strategy.barrier()

    def situation(rank, folder):
        train(folder / "whole", 6, None)
        train(folder / "stopped", 3, None)
        train(folder / "stopped", 6, folder / "stopped/last.ckpt")

    return situation


THREE = {
    "the default network": resumed({}, {}),
    "recomputed blocks, accumulated gradients": resumed(
        dict(fields=FIELDS, grad_checkpointing=True), dict(gradient_as_bucket_view=True), 2
    ),
    "a network that branches": resumed(
        dict(name="test_together:Branches", fields=None, drop_path_rate=0.0),
        dict(find_unused_parameters=True),
    ),
}


@pytest.fixture(scope="module")
def on_three(tmp_path_factory, digits_root):
    folder = tmp_path_factory.mktemp("three")
    (folder / "digits").symlink_to(digits_root)
    errors = gloo.answers(__file__, "THREE", folder, 3)
    assert errors == dict.fromkeys(THREE, [None] * 3)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", THREE)
def test_a_resumed_run_of_three_processes_ends_with_the_bits_of_one_left_alone(name, on_three):
    whole = torch.load(on_three / name / "whole/last.ckpt")
    stopped = torch.load(on_three / name / "stopped/last.ckpt")
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert same(stopped[part], whole[part]), part

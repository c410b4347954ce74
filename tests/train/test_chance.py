"""What a user's own code draws in a step follows (seed, epoch, step, process), whichever generator it takes."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import slow
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, SavesAt, images_in, trainer
from torch import Tensor, nn

import cait
from cait.train.callbacks import StepSeed

HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)
Drawn = dict[tuple[str, int, int], tuple[float, float, float]]
"""The numbers of `random`, numpy and torch, by the hook, the epoch and the batch."""


def numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))


class Notes:
    """Draws from each generator wherever code of a user's own may, and keeps the numbers."""

    def __init__(self) -> None:
        self.drawn: Drawn = {}

    def draw(self, where: str, trainer: Trainer, *_: Any, **__: Any) -> float:
        if trainer.sanity_checking:
            return 0.0
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if where == "on_train_epoch_start":  # it is still that of the epoch before
            batches = 0
        self.drawn[where, trainer.current_epoch, batches] = drawn = numbers()
        return sum(drawn)

    def callback(self) -> LambdaCallback:
        return LambdaCallback(**{hook: partial(self.draw, hook) for hook in HOOKS})


class Data(cait.ImageNetDataModule):
    """Its hooks draw while a batch moves to the device."""

    notes: Notes

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.notes.draw("on_before_batch_transfer", self.trainer)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        if self.trainer.training:
            images = images + self.notes.draw("on_after_batch_transfer", self.trainer)
        return images, labels


class Loss(nn.CrossEntropyLoss):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().forward(logits, targets) * sum(numbers())


class Module(cait.CaiTModule):
    notes: Notes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        share = self.notes.draw("training_step", self.trainer)
        return super().training_step((share * images, targets), batch_idx)


def fit(root: Path, mixup: float, start: Path | None = None, *callbacks: Any) -> tuple[Drawn, Any]:
    """What two epochs of three batches draw, and the weights."""
    notes = Notes()
    data = Data(str(root), img_size=8, batch_size=64, num_workers=1, mixup=mixup, cutmix=0.0)
    torch.manual_seed(0)
    net = Module(fields=FIELDS, lr=1e-2, lr_base_size=None, warmup_epochs=0)
    net.loss = Loss()
    data.notes = net.notes = notes
    run = trainer(
        callbacks=[StepSeed(0), notes.callback(), *callbacks],
        limit_train_batches=3,
        limit_val_batches=1,
        enable_checkpointing=bool(callbacks),
    )
    for generator in (random.seed, np.random.seed):
        generator(0 if start is None else 1)  # a resumed process is another one
    run.fit(net, datamodule=data, ckpt_path=start)
    return notes.drawn, net.state_dict()


@pytest.mark.parametrize("mixup", [0.0, *slow(0.8)])
def test_a_resumed_run_draws_what_one_left_alone_draws(
    mixup: float, digits_root: Path, tmp_path: Path
) -> None:
    saves = [SavesAt(step, tmp_path / f"{step}.ckpt") for step in (2, 3)]
    whole, weights = fit(digits_root, mixup, None, *saves)
    assert {where for where, *_ in whole} > {*HOOKS, "training_step"}
    for numbers_of in zip(*whole.values(), strict=True):
        assert len({*numbers_of}) == len(whole)  # each stands alone
    for save in saves:
        resumed, ended = fit(digits_root, mixup, save.path)
        later = {where: drawn for where, drawn in whole.items() if where in resumed}
        assert resumed == later
        assert len(later) >= len(whole) * (5 - save.step) / 6
        for name, weight in weights.items():
            assert torch.equal(weight, ended[name]), (save.step, name)


@pytest.mark.parametrize("place", ["step", "epoch", "transfer", "mixing"])
def test_each_process_each_step_and_each_seed_draws_its_own(place: str, digits_root: Path) -> None:
    def drawn(seed: int = 0, epoch: int = 0, step: int = 0, rank: int = 0) -> Any:
        progress = SimpleNamespace(current=SimpleNamespace(ready=step))
        at: Any = SimpleNamespace(
            current_epoch=epoch,
            global_rank=rank,
            training=True,
            predicting=False,
            overfit_batches=0,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        )
        data = images_in(digits_root, seed=seed)
        data.trainer = at
        if place == "step":
            StepSeed(seed).on_train_batch_start(at, None, None, step)
        elif place == "epoch":
            StepSeed(seed).on_train_epoch_start(at, None)
        elif place == "transfer":
            data._with_seed(None)
        else:
            _, shares = data.on_after_batch_transfer((torch.rand(4, 3, 8, 8), torch.arange(4)), 0)
            return [float(shares[0, 0])]
        return numbers()

    first = drawn()
    assert drawn() == first
    for other in {"seed", "epoch", "step", "rank"} - ({"step"} if place == "epoch" else set()):
        assert all(a != b for a, b in zip(first, drawn(**{other: 1}), strict=True)), other

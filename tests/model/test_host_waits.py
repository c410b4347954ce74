"""Whole training steps on a CUDA device that computes nothing: in a steady one the host never waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCUDAAccelerator, FakeCUDAStrategy, Spy, fake_cuda
from harness import slow
from lightning.pytorch import Callback, Trainer
from modules import FIELDS, module

from cait.data.datamodule import ImageNetDataModule
from cait.extras.screen.progress import RunProgressBar
from cait.extras.screen.tables import Banner
from cait.guards.nonfinite import NonFiniteGuard
from cait.run.loggers import run_loggers
from cait.train.callbacks import EMA, StepSeed

LOG_EVERY, STEPS = 2, 8
FIGURES = 4  # train/loss, train/acc1, train/grad_norm, lr
ON_THE_BAR = 2  # train/loss and train/acc1, every 10 steps and at the end of an epoch


@pytest.fixture
def digits(digits_root: Path) -> ImageNetDataModule:
    return ImageNetDataModule(root=str(digits_root), img_size=8, batch_size=8, num_workers=0, erase_prob=0.5)


def run(spy: Spy, net: Any, data: ImageNetDataModule, folder: Path, **settings: Any) -> list[list[str]]:
    """Train STEPS steps under all callbacks of a run that a step passes; where the host waited, step by step."""
    steps: list[list[str]] = []

    class Mark(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            spy.waits = []
            steps.append(spy.waits)

        def on_train_epoch_end(self, *args: object) -> None:
            spy.waits = []

    callbacks = [Mark(), StepSeed(0), RunProgressBar(), NonFiniteGuard(folder, 10), EMA(0.9), Banner(data, folder)]
    fit = Trainer(
        accelerator=FakeCUDAAccelerator(),
        strategy=FakeCUDAStrategy(spy),
        callbacks=callbacks,
        logger=run_loggers(folder / "run", 0),
        default_root_dir=folder,
        max_epochs=1,
        limit_train_batches=STEPS,
        limit_val_batches=0,
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False,
        enable_model_summary=False,
        **settings,
    )
    fit.fit(net, data)
    assert len(steps) == STEPS
    return steps


@pytest.mark.parametrize("mode", ["skip", *slow("mask")])
def test_a_steady_step_does_not_wait(mode: str, tmp_path: Path, digits: ImageNetDataModule) -> None:
    with fake_cuda() as spy:
        net = module(num_classes=10, drop_path_rate=0.3, fields=FIELDS | {"drop_path_mode": mode})
        steps = run(spy, net, digits, tmp_path, precision="bf16-mixed", gradient_clip_val=1.0)
    # The first step, and the first that is logged, make what the others use again.
    for number, waits in enumerate(steps[LOG_EVERY:], start=LOG_EVERY + 1):
        guard_and_loggers = (1 + FIGURES) * (number % LOG_EVERY == 0)
        assert len(waits) == guard_and_loggers + ON_THE_BAR * (number == STEPS), f"step {number}: {waits}"
    assert {"convolution_backward", "_foreach_lerp_", "_fused_adamw_"} <= spy.operations

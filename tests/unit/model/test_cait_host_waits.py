"""Whole training steps on a CUDA device that computes nothing: in a steady one the host never waits for it."""

import pytest
from fake_cuda import FakeCUDAAccelerator, FakeCUDAStrategy, fake_cuda
from harness import slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, images_in, module, trainer

from cait import plugins
from cait.guards.nonfinite import NonFiniteGuard
from cait.run.loggers import run_loggers
from cait.train.callbacks import EMA, StepSeed

LOG_EVERY, STEPS = 2, 6
FIGURES = 4  # train/loss, train/acc1, train/grad_norm, lr
ON_THE_BAR = 2  # train/loss and train/acc1, every 10 steps and at the end of an epoch


@pytest.mark.parametrize("mode", ["skip", *slow("mask")])
def test_a_steady_step_does_not_wait(mode, tmp_path, digits_root):
    """Under all callbacks of a run that a step passes."""
    data = images_in(digits_root, img_size=8, batch_size=8, erase_prob=0.5)
    shown = []
    if "screen" in plugins.extras():
        from cait.extras.screen.progress import RunProgressBar
        from cait.extras.screen.tables import Banner

        shown = [RunProgressBar(), Banner(data, tmp_path)]
    steps = []  # where the host waited, step by step, and after them

    def begin(*_):
        spy.waits = []
        steps.append(spy.waits)

    with fake_cuda() as spy:
        mark = LambdaCallback(on_train_batch_start=begin, on_train_epoch_end=begin)
        own = [StepSeed(0), NonFiniteGuard(tmp_path, 10), EMA(0.9), *shown]
        fit = trainer(
            accelerator=FakeCUDAAccelerator(),
            strategy=FakeCUDAStrategy(spy),
            callbacks=[mark, *own],
            logger=run_loggers(tmp_path / "run", 0),
            max_epochs=1,
            limit_train_batches=STEPS,
            limit_val_batches=0,
            log_every_n_steps=LOG_EVERY,
            enable_progress_bar=bool(shown),
            precision="bf16-mixed",
            gradient_clip_val=1.0,
        )
        fit.fit(
            module(num_classes=10, drop_path_rate=0.3, fields=FIELDS | {"drop_path_mode": mode}),
            data,
        )
    assert len(steps) == STEPS + 1
    # The first step, and the first that is logged, make what the others use again.
    for number, waits in enumerate(steps[LOG_EVERY:STEPS], start=LOG_EVERY + 1):
        guard_and_loggers = (1 + FIGURES) * (number % LOG_EVERY == 0)
        assert len(waits) == guard_and_loggers + ON_THE_BAR * (number == STEPS) * bool(shown), (
            f"step {number}: {waits}"
        )
    assert {"convolution_backward", "_foreach_lerp_", "_fused_adamw_"} <= spy.operations

"""What a user's own code draws in a step follows (seed, epoch, step, process), whichever generator it takes.

That a resumed run draws the same is a row of tests/law/test_exact.yaml.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from modules import images_in

from cait.train.callbacks import StepSeed

CHANGES = [{}, {"seed": 1}, {"epoch": 1}, {"rank": 1}, {"step": 1}]


def draw(where, root, seed=0, epoch=0, step=0, rank=0):
    """The numbers of all generators in a hook of a training step; while images are mixed, their shares."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=step))
    run = SimpleNamespace(
        current_epoch=epoch,
        global_rank=rank,
        training=True,
        predicting=False,
        overfit_batches=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )
    data = images_in(root, seed=seed)
    data.trainer = run
    if where == "mixing":
        batch = torch.rand(4, 3, 8, 8), torch.arange(4)
        return data.on_after_batch_transfer(batch, 0)[1][0, :1].tolist()
    if where == "epoch":
        StepSeed(seed).on_train_epoch_start(run, None)
    elif where == "step":
        StepSeed(seed).on_train_batch_start(run, None, None, step)
    else:
        data._with_seed(None)
    return [random.random(), np.random.random(), float(torch.rand(()))]


@pytest.mark.parametrize("where", ["step", "transfer", "epoch", "mixing"])
def test_each_process_each_step_and_each_seed_draws_its_own(where, digits_root):
    changes = CHANGES[:-1] if where == "epoch" else CHANGES
    numbers = []
    for change in changes:
        drawn = draw(where, digits_root, **change)
        assert draw(where, digits_root, **change) == drawn
        numbers += drawn
    assert len({*numbers}) == len(numbers)


def test_a_step_and_the_way_of_its_batch_draw_different_numbers(digits_root):
    assert draw("step", digits_root) != draw("transfer", digits_root) != draw("epoch", digits_root)

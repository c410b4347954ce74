"""`data.batch_size` counts images over all processes, whatever shares them out."""

from types import SimpleNamespace
from typing import Any

import pytest

import cait
from cait.errors import UserError


def shared_out(batch_size, accumulated, mixup):
    """The data of four processes."""
    data = cait.ImageNetDataModule(
        batch_size=batch_size, global_batch=True, mixup=mixup, cutmix=0.0
    )
    trainer: Any = SimpleNamespace(world_size=4, accumulate_grad_batches=accumulated, callbacks=[])
    data.share_batch(trainer)
    data.share_batch(trainer)  # nothing is shared out twice
    return data


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "mixup", "share"),
    [(32, 1, 0.8, 8), (64, 2, 0.8, 8), (16, 4, 0.0, 1)],
)
def test_a_global_batch_is_shared_out_over_four_processes(batch_size, accumulated, mixup, share):
    data = shared_out(batch_size, accumulated, mixup)
    assert data.batch_size == share
    assert data.eval_batch_size == share


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "mixup"), [(16, 4, 0.8), (30, 1, 0.0), (2, 1, 0.0)]
)
def test_a_batch_without_a_share_for_each_process_is_refused(batch_size, accumulated, mixup):
    with pytest.raises(UserError, match=f"batch_size {batch_size} .* {4 * accumulated} batches"):
        shared_out(batch_size, accumulated, mixup)


def test_a_large_global_batch_is_not_taken_to_score():
    assert cait.ImageNetDataModule(batch_size=4096, global_batch=True).eval_batch_size == 128

"""The order that draws rare classes more often."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from class_folders import fill
from modules import images_in

from cait.data.loader import TrainBatchSampler, occurrences
from cait.extras.balance.order import Balanced, shares


def batches(balance, first=0, **process):
    """The keys of an epoch of 90 images of a class and 10 of another, from a batch on."""
    order = Balanced(torch.tensor([0] * 90 + [1] * 10), balance)
    sampler: Any = TrainBatchSampler(100, 10, 3, order=order, **process)
    sampler.epoch, sampler.first_batch = 2, first
    return [*sampler]


@pytest.mark.parametrize(("balance", "count"), [("full", 50), ("sqrt", 25)])
def test_rare_images_are_drawn_more_often_and_equally(balance, count):
    keys = [*chain(*batches(balance))]
    assert len({*keys}) == len(keys) == 100
    times = Counter(index for _, index, _ in keys if index >= 90)
    assert times.total() == count
    assert max(times.values()) - min(times.values()) <= 1


def test_the_order_is_the_same_for_all_processes_and_from_any_step():
    whole = batches("full")
    assert batches("full", first=7) == whole[7:]
    first, second = (batches("full", rank=rank, world_size=2) for rank in range(2))
    keys = [*chain(*whole)]
    assert [*chain(*first)] == keys[::2]
    assert [*chain(*second)] == keys[1::2]


def test_shares_are_whole_numbers_and_occurrences_count_from_0():
    assert shares([5, 3, 2], 0.5) == [4, 3, 3]
    assert occurrences(torch.tensor([5, 7, 5, 5])).tolist() == [0, 0, 1, 2]


def test_a_balanced_checkpoint_is_not_resumed_in_another_order(tmp_path):
    root = fill(tmp_path, {"a": 6, "b": 3})
    plain, balanced = (images_in(root, batch_size=2, repeats=1, balance=b) for b in (None, "sqrt"))
    assert balanced.state_dict()["depends_on"] != plain.state_dict()["depends_on"]
    assert balanced.class_counts() == [5, 2]

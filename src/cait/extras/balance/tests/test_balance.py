"""The order that draws rare classes more often."""

from collections import Counter
from itertools import chain

import pytest
import torch
from class_folders import fill
from modules import images_in

from cait.data.loader import TrainBatchSampler
from cait.extras.balance.order import Balanced


def keys_of(balance):
    """An epoch of 90 images of a class and 10 of another."""
    order = Balanced(torch.tensor([0] * 90 + [1] * 10), balance)
    return [*chain(*TrainBatchSampler(100, 10, 3, order=order))]


@pytest.mark.parametrize(("balance", "count"), [("full", 50), ("sqrt", 25)])
def test_rare_images_are_drawn_more_often_and_equally(balance, count):
    keys = keys_of(balance)
    assert keys == keys_of(balance)
    assert len({*keys}) == len(keys) == 100
    times = Counter(index for _, index, _ in keys if index >= 90)
    assert times.total() == count
    assert max(times.values()) - min(times.values()) <= 1


def test_a_balanced_checkpoint_is_not_resumed_in_another_order(tmp_path):
    root = fill(tmp_path, {"a": 6, "b": 3})
    plain, balanced = (images_in(root, batch_size=2, repeats=1, balance=b) for b in (None, "sqrt"))
    assert balanced.state_dict()["depends_on"] != plain.state_dict()["depends_on"]
    assert balanced.class_counts() == [5, 2]

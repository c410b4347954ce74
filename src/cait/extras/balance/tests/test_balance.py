"""The order that draws rare classes more often."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from class_folders import fill

from cait.data.datamodule import ImageNetDataModule
from cait.data.loader import TrainBatchSampler, occurrences
from cait.extras.balance.order import Balanced, shares


def keys(rank: int = 0, world: int = 1, balance: str = "full", first: int = 0) -> list[list[tuple]]:
    labels = torch.tensor([0] * 90 + [1] * 10)
    sampler = TrainBatchSampler(
        100, 10, 3, rank=rank, world_size=world, order=Balanced(labels, balance)
    )
    sampler.epoch, sampler.first_batch = 2, first
    return list(sampler)


@pytest.mark.parametrize(("balance", "small"), [("full", 50), ("sqrt", 25)])
def test_the_balanced_order_is_the_same_for_all_processes_and_from_any_step(
    balance: str, small: int
) -> None:
    whole = keys(balance=balance)
    flat = [key for batch in whole for key in batch]
    assert len({*flat}) == len(flat) == 100
    times = Counter(index for _, index, _ in flat if index >= 90)
    assert times.total() == small
    assert max(times.values()) - min(times.values()) <= 1
    parts = [keys(rank, 2, balance) for rank in range(2)]
    assert [
        key
        for batches in zip(*parts, strict=True)
        for pair in zip(*batches, strict=True)
        for key in pair
    ] == flat
    assert keys(balance=balance, first=7) == whole[7:]
    assert (shares([90, 10], 0.5), shares([5, 3, 2], 0.5)) == ([75, 25], [4, 3, 3])
    assert occurrences(torch.tensor([5, 7, 5, 5])).tolist() == [0, 0, 1, 2]


def test_a_balanced_checkpoint_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    how: dict = dict(
        root=str(fill(tmp_path, {"a": 6, "b": 3})), img_size=16, batch_size=2, repeats=1
    )
    balanced, plain = (ImageNetDataModule(**how, balance=balance) for balance in ("sqrt", None))
    assert balanced.state_dict()["depends_on"] != plain.state_dict()["depends_on"]
    assert balanced.class_counts() == [5, 2]

"""The order of images in an epoch is that of timm's and torch's samplers."""

import pytest
from harness import over_table
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler

from cait.data.loader import TrainBatchSampler


def order(sampler):
    return [index for batch in sampler for _, index, _ in batch]


@over_table(__file__, "sets")
@pytest.mark.parametrize("epoch", [0, 3])
def test_repeated_augmentation_is_timms(length, world_size, epoch):
    for rank in range(world_size):
        theirs = RepeatAugSampler(range(length), num_replicas=world_size, rank=rank, num_repeats=3)
        theirs.set_epoch(epoch)
        ours = TrainBatchSampler(
            length, 1, seed=0, repeats=3, rank=rank, world_size=world_size, epoch=epoch
        )
        expected = list(theirs)
        # Below 256 images timm rounds the rank's share up and we down: no rank repeats another's entry.
        rounded_up = len(expected) - len(ours)
        assert rounded_up in ((0,) if length >= 256 else (0, 1))
        assert order(ours) == expected[: len(ours)]


def test_without_repeats_it_is_torchs_distributed_sampler():
    for rank in range(3):
        theirs = DistributedSampler(range(100), num_replicas=3, rank=rank, seed=7, drop_last=True)
        theirs.set_epoch(2)
        ours = TrainBatchSampler(100, 1, seed=7, rank=rank, world_size=3, epoch=2)
        assert order(ours) == list(theirs)

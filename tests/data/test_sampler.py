"""The order of a run against torch's and timm's samplers; its random streams, whatever the workers and restarts."""

import multiprocessing
import os
import resource
from itertools import islice
from pathlib import Path

import pytest
import torch
from modules import images_in
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler

from cait import seeds
from cait.data.loader import NO_IMAGE, Loader, ShardSampler, TrainBatchSampler, worker_start


@pytest.mark.parametrize(
    ("length", "world_size"), [(1000, 1), (1000, 4), (512, 2), (255, 1), (100, 3)]
)
@pytest.mark.parametrize("epoch", [0, 3])
def test_repeated_augmentation_is_timms_order(length: int, world_size: int, epoch: int) -> None:
    for rank in range(world_size):
        theirs = RepeatAugSampler(range(length), num_replicas=world_size, rank=rank, num_repeats=3)
        theirs.set_epoch(epoch)
        ours = TrainBatchSampler(length, 1, seed=0, repeats=3, rank=rank, world_size=world_size)
        ours.epoch = epoch
        expected = list(theirs)
        # Below 256 images timm rounds the rank's share up and we down: no rank repeats another's entry.
        assert len(expected) - len(ours) in ((0,) if length >= 256 else (0, 1))
        assert [index for ((_, index, _),) in ours] == expected[: len(ours)]


def test_without_repeats_it_is_torchs_distributed_order() -> None:
    for rank in range(3):
        theirs = DistributedSampler(range(100), num_replicas=3, rank=rank, seed=7, drop_last=True)
        theirs.set_epoch(2)
        ours = TrainBatchSampler(100, 1, seed=7, rank=rank, world_size=3)
        ours.epoch = 2
        assert [index for ((_, index, _),) in ours] == list(theirs)


def test_a_pass_may_begin_at_any_batch() -> None:
    sampler = TrainBatchSampler(103, 8, seed=0)
    whole = list(sampler)
    assert len(whole) == len(sampler) == 12
    sampler.first_batch = 5
    assert list(sampler) == whole[5:]


@pytest.mark.parametrize(("length", "world_size"), [(15, 2), (7, 4), (2, 4), (8, 1)])
def test_evaluation_sees_every_index_once(length: int, world_size: int) -> None:
    shards = [ShardSampler(length, rank, world_size) for rank in range(world_size)]
    indices = sorted(index for shard in shards for index in shard)
    assert [index for index in indices if index != NO_IMAGE] == list(range(length))
    # each process joins in adding up the metrics
    assert all(len(list(shard)) == len(shard) > 0 for shard in shards)


@pytest.mark.parametrize(("processes", "accumulated"), [(4, 1), (2, 2), (1, 4), (1, 1), (2, 4)])
def test_a_step_has_the_same_images_however_they_are_divided(
    processes: int, accumulated: int
) -> None:
    def steps(processes: int, accumulated: int) -> list[set[tuple[int, int, int]]]:
        size = 32 // processes // accumulated
        ranks = [
            [*TrainBatchSampler(512, size, 0, 3, rank, processes)] for rank in range(processes)
        ]
        batches = [
            {key for keys in together for key in keys} for together in zip(*ranks, strict=True)
        ]
        return [
            set().union(*batches[first : first + accumulated])
            for first in range(0, len(batches), accumulated)
        ]

    assert steps(processes, accumulated) == steps(1, 1)


def train_loader(root: Path, workers: int = 0) -> Loader:
    data = images_in(
        root, img_size=16, batch_size=64, num_workers=workers, repeats=3, mixup=0, cutmix=0
    )
    data.setup("fit")
    return data.train_dataloader()


def batches(
    root: Path, workers: int, first: int = 0, epoch: int = 0, count: int = 20
) -> list[torch.Tensor]:
    loader = train_loader(root, workers)
    loader.position = lambda: (epoch, first)
    return [images for images, _ in islice(loader, count)]


def test_pixels_do_not_depend_on_workers_or_on_where_the_pass_began(digits_root: Path) -> None:
    whole = batches(digits_root, workers=0, count=6)
    for other in (
        batches(digits_root, workers=2, count=6),
        [*whole[:3], *batches(digits_root, 1, first=3, count=3)],
    ):
        assert len(other) == len(whole) == 6
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    # floor(1437 / 256) · 256 images, as long as without repeats
    assert len(batches(digits_root, 0, first=18)) == 2
    assert not torch.equal(whole[0], batches(digits_root, workers=0, epoch=1, count=1)[0])
    # The repeats of one image lie in a row and are augmented anew.
    assert not torch.equal(whole[0][0], whole[0][1])


def test_without_a_trainer_the_passes_are_the_epochs_of_a_run(digits_root: Path) -> None:
    loader = train_loader(digits_root)
    for epoch in range(2):
        images, _ = next(iter(loader))
        assert torch.equal(images, batches(digits_root, 0, epoch=epoch, count=1)[0])


@pytest.mark.slow
def test_spawned_workers_give_the_same_pixels(
    digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac."""
    whole = batches(digits_root, workers=0, count=2)
    monkeypatch.setattr("cait.data.loader.START", "spawn")
    assert all(
        torch.equal(a, b) for a, b in zip(whole, batches(digits_root, 1, count=2), strict=True)
    )


@pytest.mark.parametrize("most", range(4, 15, 2))
def test_too_few_open_files_end_the_workers_that_have_started(most: int) -> None:
    """They ignore signals, so Python would wait for them at its end. With enough files all batches come."""
    images = [torch.zeros(1)] * 8
    loader = Loader(images, batch_size=1, **worker_start(3, under_trainer=True))
    before = {*multiprocessing.active_children()}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.dup(0)
    os.close(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + most, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            next(iter(loader))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for worker in {*multiprocessing.active_children()} - before:
        worker.join(10)
        assert not worker.is_alive()


@pytest.mark.parametrize(
    ("stream", "place", "number"),
    [
        ("image", (0, 0, 0, 0), 6868215007063320292),
        ("image", (7, 3, 1234567, 2), 13346929343633059636),
        ("stand_in", (7, 3, 1234567, 2, 1), 13331085093982394979),
        ("stand_in", (0, 0, 5, 0, 2), 16430331423902560101),
        ("batch_mixing", (0, 0, 0, 0), 3640927972),
        ("batch_mixing", (7, 3, 41, 1), 3872208148),
        ("training_step", (7, 3, 41, 1), 5140309018497964387),
        ("training_step", (0, 0, 0, 0), 12659741793762702060),
        ("epoch_order", (7, 3), 10),
    ],
)
def test_the_numbers_of_a_stream_stay_as_they_are(
    stream: str, place: tuple[int, ...], number: int
) -> None:
    """They never change, because runs of earlier versions must resume."""
    assert getattr(seeds, stream)(*place) == number

"""The order of a run's images and their pixels, whatever the workers, the processes and the restarts."""

import multiprocessing
import os
import resource
from itertools import islice

import pytest
import torch
from harness import over_table
from modules import images_in
from same import same

from cait.data.loader import NO_IMAGE, Loader, ShardSampler, TrainBatchSampler, worker_start


def test_a_pass_may_begin_at_any_batch():
    sampler = TrainBatchSampler(103, 8, seed=0)
    whole = list(sampler)
    assert len(whole) == len(sampler) == 12
    sampler.first_batch = 5
    assert list(sampler) == whole[5:]


@over_table(__file__, "sets")
def test_evaluation_sees_every_index_once(length, world_size):
    seen = []
    for rank in range(world_size):
        shard = ShardSampler(length, rank, world_size)
        indices = list(shard)
        assert len(indices) == len(shard) > 0  # each process joins in adding up the metrics
        seen += indices
    assert sorted(index for index in seen if index != NO_IMAGE) == list(range(length))


def steps(processes, accumulated):
    """The images of each step of 32, over all processes."""
    size = 32 // processes // accumulated
    samplers = [TrainBatchSampler(512, size, 0, 3, rank, processes) for rank in range(processes)]
    images = []
    for number, batches in enumerate(zip(*samplers, strict=True)):
        if number % accumulated == 0:
            images.append(set())
        images[-1].update(*batches)
    return images


@over_table(__file__, "steps")
def test_a_step_has_the_same_images_however_they_are_divided(processes, accumulated):
    assert steps(processes, accumulated) == steps(1, 1)


def train_loader(root, workers=0):
    data = images_in(
        root, img_size=16, batch_size=64, num_workers=workers, repeats=3, mixup=0, cutmix=0
    )
    data.setup("fit")
    return data.train_dataloader()


def batches(root, workers=0, first=0, epoch=0, count=20):
    loader = train_loader(root, workers)
    loader.position = lambda: (epoch, first)
    return [images for images, _ in islice(loader, count)]


def test_pixels_do_not_depend_on_workers_or_on_where_the_pass_began(digits_root):
    whole = batches(digits_root, count=6)
    assert len(whole) == 6
    assert same(batches(digits_root, workers=2, count=6), whole)
    assert same(batches(digits_root, workers=1, first=3, count=3), whole[3:])
    # floor(1437 / 256) · 256 images, as long as without repeats
    assert len(batches(digits_root, first=18)) == 2
    [other_epoch] = batches(digits_root, epoch=1, count=1)
    assert not torch.equal(whole[0], other_epoch)
    # The repeats of one image lie in a row and are augmented anew.
    assert not torch.equal(whole[0][0], whole[0][1])


def test_without_a_trainer_the_passes_are_the_epochs_of_a_run(digits_root):
    loader = train_loader(digits_root)
    for epoch in range(2):
        images, _ = next(iter(loader))
        assert same([images], batches(digits_root, epoch=epoch, count=1))


@pytest.mark.slow
def test_spawned_workers_give_the_same_pixels(digits_root, monkeypatch):
    """As on a Mac."""
    whole = batches(digits_root, count=2)
    monkeypatch.setattr("cait.data.loader.START", "spawn")
    assert same(batches(digits_root, workers=1, count=2), whole)


@pytest.mark.parametrize("most", range(4, 15, 2))
def test_too_few_open_files_end_the_workers_that_have_started(most):
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

"""Batches in memory that workers and the training process share, against PyTorch's own way."""

import gc
import sys
from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from cait import ImageNetDataModule
from cait.extras.fast_input.augment import SharedBatches, collate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
SHAPE = (5, 6, 3)


class Images:
    """Sample i is filled with i."""

    def __len__(self):
        return 120

    def __getitem__(self, index):
        return (torch.full(SHAPE, index, dtype=torch.uint8), None), index


def shared(places=4, size=4 * 5 * 6 * 3):
    return SharedBatches(workers=2, places=places, size=size)


def loader(batches, **settings):
    memory = partial(collate, memory=batches)
    return DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=memory, **settings)


def number(images):
    """Of the batch, which must be whole."""
    first = int(images[0, 0, 0, 0])
    expected = torch.stack([Images()[index][0][0] for index in range(first, first + 4)])
    assert torch.equal(images, expected)
    return first // 4


def test_batches_come_through_and_their_places_are_used_again():
    batches = shared()
    pointers = set()
    for turn, (images, labels, erased) in enumerate(loader(batches)):
        assert number(images) == turn
        assert labels.tolist() == [4 * turn, 4 * turn + 1, 4 * turn + 2, 4 * turn + 3]
        assert erased == []
        pointers.add(images.data_ptr())
    assert len(pointers) <= 8 < 30
    del images
    gc.collect()
    assert not batches.taken.any()


def test_what_is_kept_of_batches_stays_as_it_is():
    too_large = SharedBatches(workers=2, places=4, size=4 * 5 * 6 * 3 - 1)  # goes PyTorch's way
    for batches in (shared(), too_large):
        assert [number(images) for images in [images for images, *_ in loader(batches)]] == list(
            range(30)
        )
    assert not too_large.taken.any()
    parts = []
    for images, *_ in loader(shared(places=2)):
        parts.append(images[1, :, ::2].permute(2, 0, 1))
    assert [int(part.unique()) for part in parts] == [4 * turn + 1 for turn in range(30)]


def test_batches_that_are_too_large_go_pytorchs_way():
    batches = shared(size=4 * 5 * 6 * 3 - 1)
    assert [number(images) for images, *_ in loader(batches)] == [*range(30)]
    assert not batches.taken.any()


def test_batches_of_a_pass_that_is_given_up_are_freed():
    batches = shared()
    loading = loader(batches, persistent_workers=True)  # others take with them what they have sent
    for _ in range(6):
        assert [number(images) for images, *_ in islice(loading, 3)] == [0, 1, 2]
    assert [number(images) for images, *_ in loading] == [*range(30)]
    gc.collect()
    assert not batches.taken.any()


def test_without_workers_nothing_is_shared():
    batches = shared()
    samples = [Images()[index] for index in range(4)]
    assert number(collate(samples, batches)[0]) == 0
    assert not batches.taken.any()


def test_all_loaders_hand_over_their_images_in_shared_memory(digits_root):
    data = ImageNetDataModule(str(digits_root), img_size=16, batch_size=64, num_workers=1)
    data.setup("fit")
    for loading in (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()):
        images, _ = next(iter(loading))
        assert images.dtype == torch.float32  # normalized from uint8
        # the images were there
        assert loading.collate_fn.keywords["memory"].memory[:1000].strip(b"\0")

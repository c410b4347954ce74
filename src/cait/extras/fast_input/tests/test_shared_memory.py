"""Batches in memory that workers and the training process share, against PyTorch's own way."""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import subprocess
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import script
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from cait import ImageNetDataModule
from cait.extras.fast_input.batches import SharedBatches, collate

SHAPE = (5, 6, 3)


class Images:
    """Sample i is filled with i."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, None], int]:
        return (torch.full(SHAPE, index, dtype=torch.uint8), None), index


def loader(batches: SharedBatches, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=partial(collate, memory=batches), **settings)


def shared(places: int = 4) -> SharedBatches:
    return SharedBatches(workers=2, places=places, size=4 * 5 * 6 * 3)


def number(images: Tensor) -> int:
    """Of the batch, which must be whole."""
    expected = torch.arange(int(images[0, 0, 0, 0]), int(images[0, 0, 0, 0]) + 4, dtype=torch.uint8)
    assert torch.equal(images, expected.view(-1, 1, 1, 1).expand(4, *SHAPE))
    return int(expected[0]) // 4


pytestmark = pytest.mark.skipif(not SharedBatches.possible(), reason="workers are not forked here")


def test_batches_come_through_and_their_places_are_used_again() -> None:
    batches = shared()
    pointers = set()
    for turn, (images, labels, erased) in enumerate(loader(batches)):
        assert number(images) == turn
        assert labels.tolist() == list(range(4 * turn, 4 * turn + 4))
        assert erased == []
        pointers.add(images.data_ptr())
    assert len(pointers) <= 8 < 30
    del images
    gc.collect()
    assert not batches.taken.any()


def test_batches_that_are_kept_stay_as_they_are() -> None:
    kept = [images for images, *_ in loader(shared())]
    assert [number(images) for images in kept] == list(range(30))


def test_a_part_of_a_batch_keeps_its_place() -> None:
    parts = []
    for images, *_ in loader(shared(places=2)):
        parts.append(images[1, :, ::2].permute(2, 0, 1))
    assert [int(part.unique()) for part in parts] == [4 * turn + 1 for turn in range(30)]


def test_batches_of_a_pass_that_is_given_up_are_freed() -> None:
    batches = shared()
    loading = loader(batches, persistent_workers=True)  # others take with them what they have sent
    for _ in range(6):
        assert [number(images) for images, *_ in islice(loading, 3)] == [0, 1, 2]
    assert [number(images) for images, *_ in loading] == list(range(30))
    gc.collect()
    assert not batches.taken.any()


def test_a_batch_that_is_larger_goes_pytorchs_way() -> None:
    batches = SharedBatches(workers=2, places=4, size=4 * 5 * 6 * 3 - 1)
    assert [number(images) for images, *_ in loader(batches)] == list(range(30))
    assert not batches.taken.any()


SMALL = """
import ctypes, gc, os, sys, torch
from pathlib import Path
uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000 | 0x00020000) == 0  # CLONE_NEWUSER | CLONE_NEWNS
for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    Path("/proc/self", file).write_text(text)
assert os.system("mount -t tmpfs -o size=1m tmpfs /dev/shm") == 0
from itertools import zip_longest
from lightning.pytorch import LightningModule, Trainer
from cait import ImageNetDataModule
from cait.data import folder

root = sys.argv[1]

class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch):
        return self.weight.sum() * batch[0].sum()
    def validation_step(self, batch):
        return batch[0].sum()
    test_step = predict_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

data = ImageNetDataModule(root, img_size=160, batch_size=16, num_workers=1, repeats=1)
data.setup("fit")
others = [data.val_dataloader(), data.predict_dataloader(), data.extra_val_dataloader(data.val_images.samples)]
for batches in zip_longest(data.train_dataloader(), *others):  # all alive at once
    assert all(batch is None or batch[0].shape == (16, 3, 160, 160) for batch in batches)
del batches
gc.collect()
assert not any(loader.collate_fn.keywords["memory"].taken.any() for loader in others)

for backend in ("auto", "timm"):
    data = ImageNetDataModule(root, img_size=160, batch_size=16, repeats=1, num_workers=1, backend=backend)
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Plain(), datamodule=data)
trainer.predict(Plain(), datamodule=data, return_predictions=False)
print("all came through")
"""


@pytest.mark.slow
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    # In its own mount namespace, where no batch fits into /dev/shm. The labels do.
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    noise = np.random.default_rng(0)
    for split, count in (("train", 96), ("val", 96)):
        for number in range(count):
            path = tmp_path / split / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    (tmp_path / "small.py").write_text(SMALL)
    done = script("small.py", tmp_path, str(tmp_path))
    assert done.stdout.endswith("all came through\n"), done.stderr[-2000:]


def test_workers_are_forked_whatever_pythons_default_is(digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # Python 3.14's
    try:
        data = ImageNetDataModule(str(digits_root), img_size=16, batch_size=64, num_workers=1)
        data.setup("validate")
        loading = data.val_dataloader()
        assert sum(len(labels) for _, labels in loading) == 360
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert loading.collate_fn.keywords["memory"].memory[:1000].strip(b"\0")  # the images were there


def test_without_workers_nothing_is_shared() -> None:
    batches = shared()
    samples = [Images()[index] for index in range(4)]
    assert number(collate(samples, batches)[0]) == 0
    assert not batches.taken.any()

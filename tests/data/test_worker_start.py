"""The loader's processes: forked or started anew, with the same bits."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import slow
from torch import Tensor

from cait import cores
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError

SETTINGS: dict[str, Any] = dict(img_size=16, batch_size=64, mixup=0, cutmix=0)


def loaded(root: Path, **settings: Any) -> tuple[ImageNetDataModule, list[Tensor], Any]:
    """The first batches of training and validation, and the loader."""
    data = ImageNetDataModule(str(root), **SETTINGS | settings)
    data.setup("fit")
    loader = data.train_dataloader()
    found = [part for batch in islice(loader, 5) for part in batch]
    return data, found + [part for batch in islice(data.val_dataloader(), 2) for part in batch], loader


@pytest.mark.parametrize("backend", ["auto", *slow("timm")])
@pytest.mark.parametrize("start", ["fork", *slow("spawn")])
def test_pixels_and_order_do_not_depend_on_how_workers_start(digits_root: Path, start: str, backend: str) -> None:
    _, expected, _ = loaded(digits_root, backend=backend, num_workers=0)
    _, found, loader = loaded(digits_root, backend=backend, num_workers=1, worker_start=start)
    assert loader.multiprocessing_context.get_start_method() == start
    assert len(found) == len(expected) == 14
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_how_workers_start_is_one_of_three() -> None:
    assert cores.worker_start("auto").get_start_method() == "fork"
    with pytest.raises(UserError, match="worker_start must be one of auto, fork, spawn, got 'thread'"):
        ImageNetDataModule("x", worker_start="thread")

"""The loader's processes: forked, forked by a server, or started anew, with the same bits."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import slow
from torch import Tensor

from cait import cores
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError

SETTINGS: dict[str, Any] = dict(img_size=16, batch_size=64, mixup=0, cutmix=0)


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    multiprocessing.forkserver._forkserver._stop()


def loaded(root: Path, **settings: Any) -> tuple[ImageNetDataModule, list[Tensor], Any]:
    """The first batches of training and validation, and the loader."""
    data = ImageNetDataModule(str(root), **SETTINGS | settings)
    data.setup("fit")
    loader = data.train_dataloader()
    found = [part for batch in islice(loader, 5) for part in batch]
    return data, found + [part for batch in islice(data.val_dataloader(), 2) for part in batch], loader


@pytest.mark.parametrize("backend", ["auto", *slow("timm")])
@pytest.mark.parametrize("start", ["fork", "forkserver", *slow("spawn")])
def test_pixels_and_order_do_not_depend_on_how_workers_start(digits_root: Path, start: str, backend: str) -> None:
    _, expected, _ = loaded(digits_root, backend=backend, num_workers=0)
    _, found, loader = loaded(digits_root, backend=backend, num_workers=1, worker_start=start)
    assert loader.multiprocessing_context.get_start_method() == start
    assert len(found) == len(expected) == 14
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_auto_forks_on_the_cpu_and_has_a_server_fork_on_cuda() -> None:
    cpu, cuda = (SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(name))) for name in ("cpu", "cuda"))
    assert cores.worker_start("auto", None, []).get_start_method() == "fork"
    assert cores.worker_start("auto", cpu, []).get_start_method() == "fork"
    assert cores.worker_start("auto", cuda, []).get_start_method() == "forkserver"
    assert cores.worker_start("auto", cuda, lambda: None).get_start_method() == "fork"
    with pytest.raises(UserError, match=r"--data.worker_start spawn: the data set .* cannot be sent .*; take fork"):
        cores.worker_start("spawn", cuda, lambda: None)


def test_how_workers_start_is_one_of_four() -> None:
    with pytest.raises(UserError, match="worker_start must be one of auto, fork, forkserver, spawn, got 'thread'"):
        ImageNetDataModule("x", worker_start="thread")


def test_a_signal_to_all_does_not_end_the_server_that_forks(digits_root: Path) -> None:
    """As a scheduler sends it: the current step still needs the workers."""
    _, _, loader = loaded(digits_root, num_workers=1, worker_start="forkserver")
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(server, signum)
    time.sleep(0.5)
    assert os.waitpid(server, os.WNOHANG) == (0, 0)
    assert len(list(islice(loader, 3))) == 3

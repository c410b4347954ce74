"""What an epoch says of the time that its steps waited for images."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cait import ImageNetDataModule, cores
from cait.data import loader
from cait.data.loader import Loader
from cait.errors import UserError
from cait.extras.throughput.wait import WaitHint, advice
from cait.run import clock as run_clock
from cait.run.clock import Clock
from cait.run.progress import EpochLines


class Time:
    """Stands where `time` does, and goes on only when someone sleeps: how fast the machine is does not matter."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    for module in (run_clock, loader):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Busy(LightningModule):
    """Steps that take some time each."""

    def __init__(self, clock: Time, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor) -> Tensor:
        self.clock.sleep(self.seconds)
        return (self.weight * batch.sum()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Slow(list):
    """Items that take some time each."""

    def __getitem__(self, index: Any) -> Any:
        self.clock.sleep(self.seconds)
        return super().__getitem__(index)


def said(clock: Time, step: float, item: float, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed in two epochs of ten steps."""
    items = Slow(torch.zeros(10, 1))
    items.clock, items.seconds = clock, item
    hint = WaitHint(ImageNetDataModule(root=str(root), num_workers=0))
    callbacks = [measure := Clock(), hint, EpochLines(measure)]
    settings: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **settings)
    trainer.fit(Busy(clock, step), Loader(items, batch_size=None))
    return capsys.readouterr().out


LINE = r"^epoch (\d)/2 .* waited (\d+\.\d) s of (\d+\.\d) s for images \((\d+)%\)$"


def test_steps_that_starve_are_told_and_once_how_to_feed_them(
    clock: Time, digits_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = said(clock, 1.0, 3.0, digits_root, capsys)
    assert re.findall(LINE, printed, re.MULTILINE) == [(epoch, "30.0", "40.0", "75") for epoch in ("1", "2")]
    assert printed.count("The steps wait for images: ") == 1


@pytest.mark.parametrize(("step", "item"), [(2.0, 0.1), (0.2, 0.6)])  # fed; and starved, but too briefly
def test_steps_that_are_fed_say_so_and_no_more(
    step: float, item: float, clock: Time, digits_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = said(clock, step, item, digits_root, capsys)
    assert len(re.findall(LINE, printed, re.MULTILINE)) == 2
    assert "wait for images" not in printed


@pytest.mark.parametrize(
    ("settings", "processes", "world_size", "words"),
    [
        (dict(num_workers=1), 1, 1, "each process has 8 cores and num_workers is 1; try --data.num_workers 8"),
        (dict(num_workers=1), 4, 4, "each process has 2 cores and num_workers is 1; try --data.num_workers 2"),
        (dict(backend="torchvision"), 1, 1, "nvidia-nvimgcodec-cu13 decodes faster, with the same pixels"),
        (dict(backend="pillow"), 8, 8, "nvidia-nvimgcodec-cu13"),
        (dict(backend="timm"), 1, 1, "--data.backend auto is about twice as fast"),
        (dict(backend="nvimgcodec", repeats=3), 4, 8, "--data.decode_once true"),
        (dict(backend="nvimgcodec", repeats=3), 1, 1, "all 8 cores of each process are at work"),
        (dict(backend="nvimgcodec", repeats=3, decode_once=True), 4, 8, "all 2 cores of each process"),
    ],
)
def test_the_advice_is_what_would_help(
    digits_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    processes: int,
    world_size: int,
    words: str,
) -> None:
    data = ImageNetDataModule(root=str(digits_root), **settings)
    try:
        _ = data.pipeline
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert words in advice(data, processes, world_size)


def test_processes_that_slurm_has_bound_are_not_told_to_use_each_others_cores(
    digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    data = ImageNetDataModule(root=str(digits_root), backend="pillow", num_workers=1)
    assert "has 12 cores and num_workers is 1; try --data.num_workers 12" in advice(data, 8, 8)
    data.num_workers = None
    assert data.workers(8) == 12
    assert "num_workers" not in advice(data, 8, 8)

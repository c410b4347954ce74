"""What an epoch says of the time that its steps waited for images."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from starving import Time, train_starving

from cait import ImageNetDataModule, cores
from cait.data import loader
from cait.errors import UserError
from cait.extras import clock as run_clock
from cait.extras.clock import Clock
from cait.extras.throughput.wait import WaitHint, advice


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    for module in (run_clock, loader):
        monkeypatch.setattr(module, "time", clock)
    return clock


def said(clock: Time, step: float, item: float, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed in two epochs of ten steps."""
    measure = Clock()
    train_starving(clock, step, item, measure, WaitHint(ImageNetDataModule(root=str(root), num_workers=0), measure))
    return capsys.readouterr().out


def test_steps_that_starve_are_told_once_how_to_feed_them(
    clock: Time, digits_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(clock, 1.0, 3.0, digits_root, capsys).count("The steps wait for images: ") == 1


@pytest.mark.parametrize(("step", "item"), [(2.0, 0.1), (0.2, 0.6)])  # fed; and starved, but too briefly
def test_steps_that_are_fed_say_nothing(
    step: float, item: float, clock: Time, digits_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "wait for images" not in said(clock, step, item, digits_root, capsys)


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

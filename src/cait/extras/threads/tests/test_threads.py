"""A small network trains with one thread on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL
from lightning.pytorch import Callback
from networks import needs_cait

from cait.cli import main
from cait.extras.threads.callback import SMALL as SMALL_NETWORK


class Threads(Callback):
    """Print how many threads a step runs with."""

    def on_train_batch_start(self, *_: Any) -> None:
        print("threads:", torch.get_num_threads())


@pytest.fixture
def fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A step of a network whose batch holds 64 × 16 × 32 numbers, in a process of three threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    step = [
        "--trainer.fast_dev_run=1",
        "--data.num_workers=0",
        "--trainer.callbacks+=test_threads.Threads",
    ]
    yield ["fit", *SMALL, *step]
    torch.set_num_threads(before)


@needs_cait
def test_a_small_batch_has_one_thread_unless_a_number_is_given(
    fit: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = 16 * 32
    main([*fit, f"--data.batch_size={SMALL_NETWORK // tokens}"])
    assert torch.get_num_threads() == 3
    main([*fit, f"--data.batch_size={SMALL_NETWORK // tokens + 2}"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    main(fit)
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("threads:")] == [
        "threads: 1",
        "threads: 3",
        "threads: 3",
    ]

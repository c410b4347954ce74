"""A small network trains with one thread on the CPU."""

import pytest
import torch
from harness import SMALL
from lightning.pytorch import Callback
from networks import needs_cait

from cait.extras.threads import callback


class Threads(Callback):
    """Print how many threads a step runs with."""

    def on_train_batch_start(self, *_):
        print("threads:", torch.get_num_threads())


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


LARGEST = callback.SMALL // (16 * 32)
"""Images of the largest small batch, of 16 tokens of 32 numbers."""


@needs_cait
@pytest.mark.parametrize(
    ("batch", "asked", "threads"), [(LARGEST, "", 1), (LARGEST + 2, "", 3), (64, "3", 3)]
)
def test_a_small_batch_has_one_thread_unless_a_number_is_given(
    batch, asked, threads, cait, monkeypatch
):
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    step = ["--trainer.fast_dev_run=1", "--data.num_workers=0", f"--data.batch_size={batch}"]
    done = cait("fit", *SMALL, *step, "--trainer.callbacks+=test_threads.Threads")
    assert f"threads: {threads}\n" in done.stdout
    assert torch.get_num_threads() == 3

"""The loader: its settings, when it starts, and its processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from cait import cores
from cait.errors import UserError
from cait.settings import check_at_least, check_choice

READY = 2
"""Batches that each loader process has ready."""


@dataclass(frozen=True)
class Loading:
    """How images are read and put into batches."""

    batch_size: int = 128
    """Images in a batch of one process; even with Mixup or CutMix."""
    global_batch: bool = False
    """`batch_size` is of one optimizer step instead, over all processes and accumulated batches, so that a run does not
    depend on the number of processes."""
    eval_batch_size: int | None = None
    """The batch of one process in validation and prediction; None means `batch_size`."""
    backend: Literal["auto", "timm"] = "auto"
    """What reads the training images. "timm" is timm's own transform, to the last bit. "auto" is an extra, faster,
    with timm's random draws and nearly its pixels. Without the extra it means "timm". Evaluation has timm's pixels."""
    repeats: int = 3
    """Repeated augmentation: how often each sampled image occurs in an epoch, each time augmented anew. An epoch is as
    long as without it."""
    balance: Literal["sqrt", "full"] | None = None
    """Draw the images of small classes more often, and those of large classes less. "full" gives all classes the same
    share of an epoch. "sqrt" gives each class a share in proportion to the square root of its number of images."""
    num_workers: int | None = None
    """Loader processes for each training process, each on one core. None means its share of the cores, at most 16, see
    `cait.cores.share`."""
    max_bad_share: float = 0.01
    """Share of the images that may be unreadable, one at least unless it is 0. In training others stand in for them,
    validation leaves them out, and unreadable_images.csv in the run's folder lists them. More end the run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "eval_batch_size", "repeats")
        check_at_least(self, 0, "num_workers")
        check_choice(self, {"backend": ("auto", "timm"), "balance": ("sqrt", "full", None)})
        if not 0 <= self.max_bad_share < 1:
            raise UserError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")

    def bad_allowed(self, images: int) -> int:
        """How many of so many images may be unreadable: the share, or one in a small set unless the share is 0."""
        return max(1, int(self.max_bad_share * images)) if self.max_bad_share else 0


class Loader(DataLoader[Any]):
    """A DataLoader that starts its workers when the first batch is fetched, and measures how long its user waits.

    Lightning calls `iter()` before it has restored the epoch and the batch of a checkpoint. A loader that started its
    workers then would replay the wrong epoch.

    Args:
        position: returns (epoch, first batch) of the pass that is about to begin, for a `TrainBatchSampler`.
        finish: applied to each batch in this process, where Lightning's hook does not run.
    """

    def __init__(
        self,
        *args: Any,
        position: Callable[[], tuple[int, int]] | None = None,
        finish: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.position, self.finish = position, finish
        self.waited = 0.0
        """Seconds that its user has waited for batches so far."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = time.perf_counter()
        if self.position is not None:
            sampler: Any = self.batch_sampler
            sampler.epoch, sampler.first_batch = self.position()
        for batch in super().__iter__():
            self.waited += time.perf_counter() - start
            yield self.finish(batch) if self.finish else batch
            start = time.perf_counter()


def worker_start() -> Any:
    """How loader processes start; None is Python's default.

    A fork shares the lists of images with them, where new processes get copies. Beyond Linux it is not safe.
    """
    return multiprocessing.get_context("fork") if sys.platform == "linux" else None


def init_worker(worker_id: int, under_trainer: bool) -> None:
    """What a worker process begins with."""
    # A scheduler signals the whole group of processes. Under the Trainer workers ignore that, because the current
    # step still needs them, and the Trainer ends them. Without a Trainer, SIGTERM ends them when the script ends.
    for signum in cores.STOPPING if under_trainer else ():
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, cores.STOPPING)
    # Workers share the cores among themselves; threads of their own would only get in each other's way.
    torch.set_num_threads(1)

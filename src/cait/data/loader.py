"""The loader: its settings, a global batch divided, when it starts, and its processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from cait import cores
from cait.errors import UserError
from cait.settings import check_at_least, check_choice


@dataclass(frozen=True)
class Loading:
    """How images are read and put into batches."""

    batch_size: int = 128
    """Images in a batch of one process; even with Mixup or CutMix."""
    global_batch: bool | int = False
    """True makes `batch_size` the images of one optimizer step, over all processes and accumulated batches, so that a
    run does not depend on the number of processes. A number is the images of one optimizer step instead: `batch_size`
    stays the batch of one process, and the Trainer accumulates as many batches as it takes. An epoch then has only
    whole steps."""
    eval_batch_size: int | None = None
    """The batch of one process in validation and prediction; None means `batch_size`."""
    backend: Literal["auto", "timm"] = "auto"
    """What reads the training images. "timm" is timm's own transform, to the last bit. "auto" is faster, makes timm's
    random draws and nearly its pixels; it is an extra, without which timm's transform is taken. Evaluation always uses
    timm's pixels."""
    repeats: int = 3
    """Repeated augmentation: how often each sampled image occurs in an epoch, each time augmented anew. The epoch stays
    as long as without it."""
    balance: Literal["sqrt", "full"] | None = None
    """Draw the images of small classes more often, and those of large classes less. "full" gives all classes the same
    share of an epoch. "sqrt" gives each class a share in proportion to the square root of its number of images."""
    num_workers: int | None = None
    """Loader processes for each training process, each on one core. None means its share of the cores, at most 16, see
    `cait.cores.share`."""
    worker_start: Literal["auto", "fork", "spawn"] = "auto"
    """How loader processes start, see `cait.cores.worker_start`. "auto" is fork on Linux."""
    prefetch: int = 2
    """Batches that each worker has ready."""
    max_bad_share: float = 0.01
    """Share of the images that may be unreadable, one at least unless it is 0. In training others stand in for them,
    validation leaves them out, and unreadable_images.csv in the run's folder lists them. More end the run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "eval_batch_size", "repeats", "prefetch")
        check_at_least(self, 0, "num_workers")
        check_choice(self, {"backend": ("auto", "timm"), "worker_start": cores.STARTS})
        check_choice(self, {"balance": ("sqrt", "full", None)})
        if not isinstance(self.global_batch, bool) and self.global_batch < 1:
            raise UserError(f"global_batch must be true, false or at least 1, got {self.global_batch}")
        if not 0 <= self.max_bad_share < 1:
            raise UserError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")

    def bad_allowed(self, images: int) -> int:
        """How many of so many images may be unreadable: the share, or one in a small set unless the share is 0."""
        return max(1, int(self.max_bad_share * images)) if self.max_bad_share else 0


def images_a_batch(images: int, even: bool, trainer: Trainer) -> int:
    """The images of each batch, if a step of `images` images is shared out over processes and accumulated batches.

    Raises UserError if the parts are not even, or of an odd number of images although `even` is asked for.
    """
    parts = trainer.world_size * trainer.accumulate_grad_batches
    batch_size, left = divmod(images, parts)
    if left or batch_size < 1 or (even and batch_size % 2):
        of = ", each of an even number for Mixup and CutMix" if even else ""
        batches = f"{parts} batches (processes × accumulation){of}; change it, or set --data.global_batch false"
        raise UserError(f"--data.batch_size {images} cannot be shared out over {batches}")
    return batch_size


def batches_a_step(images: int, batch_size: int, trainer: Trainer) -> int:
    """The batches of `batch_size` that each process accumulates for steps of `images` images over all processes.

    Raises UserError if the result is not a whole number, or the Trainer, which has not started yet, accumulates.
    """
    processes = trainer.world_size
    if (given := trainer.accumulate_grad_batches) != 1:
        how = f"--trainer.accumulate_grad_batches {given}"
        raise UserError(f"--data.global_batch {images} chooses how many batches are accumulated; leave out {how}")
    batches, left = divmod(images, processes * batch_size)
    if left or not batches:
        batch = f"{processes} process(es) × --data.batch_size {batch_size}"
        raise UserError(f"--data.global_batch {images} is not a multiple of {batch}")
    rank_zero_info(f"global batch {images} = {processes} × {batch_size} images × {batches} accumulated")
    return batches


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


def init_worker(worker_id: int, under_trainer: bool) -> None:
    """What a worker process begins with."""
    # A scheduler signals the whole group of processes. Under the Trainer workers ignore that, because the current
    # step still needs them, and the Trainer ends them. Without a Trainer, SIGTERM ends them when the script ends.
    for signum in cores.STOPPING if under_trainer else ():
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, cores.STOPPING)
    # Workers share the cores among themselves; threads of their own would only get in each other's way.
    torch.set_num_threads(1)

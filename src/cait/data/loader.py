"""The order of a run's images as a function of (seed, epoch, step), and the loader that follows it."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from cait import cores, seeds
from cait.settings import Group, In, PositiveInt, Settings, ShareBelow1

Key = tuple[int, int, int]
"""(epoch, index, repeat): with the seed, all that the randomness of one training image depends on."""
NO_IMAGE = -1
"""In the place of an index: a blank image that is not counted."""
READY = 2
"""Batches that each loader process has ready."""
MOST_WORKERS = 1024
"""A run of somebody else may ask for any number."""
START = "fork" if sys.platform == "linux" else None
"""How loader processes start; None is Python's default. A fork shares the lists of images, where new processes get
copies. Beyond Linux it is not safe."""


@dataclass(frozen=True)
class Loading(Group):
    """How images are read and put into batches."""

    batch_size: PositiveInt = 128
    """Images in a batch of one process; an even number if Mixup or CutMix is on."""
    global_batch: bool = False
    """`batch_size` is of one optimizer step instead, over all processes and accumulated batches, so that a run does not
    depend on the number of processes."""
    eval_batch_size: PositiveInt | None = None
    """The batch of one process in validation and prediction; None means `batch_size`."""
    backend: Literal["auto", "timm"] = "auto"
    """What reads the training images. "timm" is timm's own transform, to the last bit. "auto" is an extra, faster,
    with timm's random draws and nearly its pixels. Without the extra it means "timm". Evaluation has timm's pixels."""
    repeats: PositiveInt = 3
    """Repeated augmentation: how often each sampled image occurs in an epoch, each time augmented anew. An epoch is as
    long as without it."""
    num_workers: Annotated[int | None, In(f"[0, {MOST_WORKERS}]")] = None
    """Loader processes for each training process, each on one core. None means its share of the cores, at most 16, see
    `cait.cores.share`."""
    max_bad_share: ShareBelow1 = 0.01
    """Share of the images that may be unreadable, one at least unless it is 0. In training others stand in for them,
    validation leaves them out, and unreadable_images.csv in the run's folder lists them. More end the run."""

    def bad_allowed(self, images: int) -> int:
        """How many of `images` images may be unreadable: the share, or one in a small set unless the share is 0."""
        return max(1, int(self.max_bad_share * images)) if self.max_bad_share else 0


class Order(Protocol):
    """The order of the images in an epoch, before repeats and ranks divide it."""

    @property
    def name(self) -> str:
        """What it depends on besides the seed; a checkpoint of another name is not resumed."""

    def __call__(self, generator: torch.Generator) -> Tensor:
        """The indices of the images, as many as there are images."""


@dataclass(frozen=True)
class Published:
    """All images, shuffled."""

    length: int
    name = "published"

    def __call__(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.length, generator=generator)


@dataclass(eq=False)
class TrainBatchSampler(Sampler[list[Key]]):
    """Batches of one rank, in the order of the epoch, from any step on.

    With repeated augmentation (Hoffer et al., arXiv 1901.09335) each index of the order comes `repeats` times in a row.
    Rank r of w takes every w-th entry from r on, so the repeats of one image go to different ranks. As published, the
    epoch is cut at floor(len // 256 · 256 / w) entries a rank, so it is as long as without repeats. A last batch that
    is not full is left out. No two keys of an epoch are the same: an image that comes several times in an order has
    repeat numbers that continue.
    """

    length: int
    """Images of the data set."""
    batch_size: int
    seed: int
    repeats: int = 1
    rank: int = 0
    world_size: int = 1
    order: Order | None = None
    """None is the published one, a seeded permutation."""
    epoch: int = 0
    first_batch: int = 0
    """The batch of the epoch to begin with."""

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        usable = self.length
        if self.repeats > 1 and usable >= 256:
            usable -= usable % 256
        return usable // self.world_size // self.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        generator = torch.Generator().manual_seed(seeds.epoch_order(self.seed, epoch))
        draw = self.order or Published(self.length)
        order = draw(generator)
        first_repeats = occurrences(order) * self.repeats
        for batch in range(self.first_batch, len(self)):
            entries = torch.arange(self.batch_size) + batch * self.batch_size  # of this rank
            entries = entries * self.world_size + self.rank  # among those of all ranks
            positions = entries // self.repeats
            repeats = first_repeats[positions] + entries % self.repeats
            pairs = zip(order[positions].tolist(), repeats.tolist(), strict=True)
            yield [(epoch, index, repeat) for index, repeat in pairs]


def occurrences(order: Tensor) -> Tensor:
    """How often each entry has occurred in `order` before: [5, 7, 5, 5] gives [0, 0, 1, 2]."""
    if order.bincount().max() == 1:  # sorting a million takes half a second
        return torch.zeros_like(order)
    by_index = order.argsort(stable=True)
    ranked = order[by_index]
    counts = torch.empty_like(order)
    counts[by_index] = torch.arange(len(order)) - torch.searchsorted(ranked, ranked)
    return counts


class ShardSampler(SequentialSampler):
    """Every index exactly once over all ranks: rank r of w takes r, r + w, r + 2w, ...

    Unlike DistributedSampler it repeats no index to make the ranks even, so that accuracies are exact. A rank without
    an image takes NO_IMAGE, because it has to join in adding up the metrics. It is a SequentialSampler because
    Lightning replaces all others under `overfit_batches`.
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size) or [NO_IMAGE]
        super().__init__(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class _Workers(_MultiProcessingDataLoaderIter):
    """Torch's workers. If not all can start, as without enough open files, those that have started are ended.

    Torch cannot end them, and they ignore signals, so Python would wait for them for ever.
    """

    _workers: Any = ()

    def __init__(self, loader: DataLoader[Any]) -> None:
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown = True  # torch has nothing left to end
            for worker in self._workers:
                worker.kill()
            raise


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
        self.position = position
        self.finish = finish
        self.waited = 0.0
        """Seconds that its user has waited for batches so far."""

    def _get_iterator(self) -> Any:
        return _Workers(self) if self.num_workers else super()._get_iterator()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = time.perf_counter()
        if self.position is not None:
            sampler: Any = self.batch_sampler
            sampler.epoch, sampler.first_batch = self.position()
        for batch in super().__iter__():
            self.waited += time.perf_counter() - start
            yield self.finish(batch) if self.finish else batch
            start = time.perf_counter()


def worker_start(workers: int, under_trainer: bool) -> Settings:
    if workers == 0:
        return {}
    return dict(
        num_workers=workers,
        multiprocessing_context=START,
        worker_init_fn=partial(init_worker, under_trainer=under_trainer),
        prefetch_factor=READY,
        persistent_workers=True,
    )


def init_worker(worker_id: int, under_trainer: bool) -> None:
    # A scheduler signals the whole group of processes. Under the Trainer workers ignore that, because the current
    # step still needs them, and the Trainer ends them. Without a Trainer, SIGTERM ends them when the script ends.
    for signum in cores.STOPPING if under_trainer else ():
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, cores.STOPPING)
    # Workers share the cores among themselves; threads of their own would only get in each other's way.
    torch.set_num_threads(1)

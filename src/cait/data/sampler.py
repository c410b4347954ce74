"""The order of a run's images as a function of (seed, epoch, step).

Nothing here keeps state between epochs or depends on workers, so a resumed run sees what the
uninterrupted run would have seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from cait import seeds

Order = Literal["published", "windowed"]
Balance = Literal["sqrt", "full"]
POWERS: dict[Balance, float] = {"sqrt": 0.5, "full": 0.0}
"""A class of n images gets a share of an epoch that grows with n to this power."""
Key = tuple[int, int, int]
"""(epoch, index, repeat): with the seed, all that the randomness of one training image depends on."""


class TrainBatchSampler(Sampler[list[Key]]):
    """Batches of one rank, in the order of the epoch, from any step on.

    The global order of an epoch is a seeded permutation. With repeated augmentation (Hoffer et al.,
    arXiv 1901.09335) each index appears in it `repeats` times in a row. Rank r of w takes every w-th entry
    from r on, so the repeats of one image go to different ranks. As published, the epoch is cut at
    floor(len // 256 · 256 / w) entries a rank, so it is as long as without repeats. A last batch that is
    not full is left out.

    `decode_once` is not as published: rank r takes every w-th image with all its repeats, one after the
    other, so one process decodes the image, once. Over all ranks the images of a step, and so its gradient,
    are other draws of the same kind. But a rank's batch, in which Mixup and CutMix pair images, has a third
    as many different images, each three times. On one process the two are the same.

    With `chunks` the order is not as published either: it suits shards that come over a network. The chunks are put
    into a seeded order, and each image follows its chunk's turn by a random distance below `window` chunks. So at most
    `window` chunks are in use at any moment, and each is used once in an epoch. Images of one chunk are always less
    than `window` chunks apart; the images of each chunk were drawn at random when the shards were made. Repeats and
    ranks divide this order as they do the published one.

    With `labels` and `balance` an epoch is as long, but the classes' shares of it are closer to each other, as `POWERS`
    says. Images of a small class then come several times, augmented anew each time: repeat numbers continue, so no two
    keys of an epoch are the same. Within a class, the counts of two images differ by at most one.

    Args:
        chunks: the chunk of each image, counted from 0; None is the published order.
        window: chunks that are in use at any moment.
        labels: the class of each image, for `balance`.
        balance: how far the classes are balanced; None leaves them as they are.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        repeats: int = 1,
        rank: int = 0,
        world_size: int = 1,
        decode_once: bool = False,
        chunks: Tensor | None = None,
        window: int = 0,
        labels: Tensor | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.length, self.batch_size, self.seed, self.repeats = length, batch_size, seed, repeats
        self.decode_once = decode_once
        self.chunks, self.window = chunks, window
        self.labels, self.balance = labels, balance
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.first_batch = 0
        self.accumulated = 1
        """Batches of an optimizer step; an epoch has only whole steps."""
        usable = length // 256 * 256 if repeats > 1 and length >= 256 else length
        self.entries = usable // world_size

    def __len__(self) -> int:
        """Batches in a whole epoch: as many as fill whole steps of `accumulated` batches."""
        return self.entries // (self.batch_size * self.accumulated) * self.accumulated

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        generator = torch.Generator().manual_seed(seeds.epoch_order(self.seed, epoch))
        order = self._order(generator)
        counted = occurrences(order) * self.repeats if self.balance else torch.zeros_like(order)
        for batch in range(self.first_batch, len(self)):
            entries = torch.arange(batch * self.batch_size, (batch + 1) * self.batch_size)  # of this rank
            if self.decode_once:
                places, repeats = entries // self.repeats * self.world_size + self.rank, entries % self.repeats
            else:
                entries = entries * self.world_size + self.rank  # of all ranks
                places, repeats = entries // self.repeats, entries % self.repeats
            indices, counts = order[places].tolist(), (repeats + counted[places]).tolist()
            yield [(epoch, index, repeat) for index, repeat in zip(indices, counts, strict=True)]

    def _order(self, generator: torch.Generator) -> Tensor:
        if self.chunks is not None:
            return self._windowed(self.chunks, generator)
        if self.balance is None or self.labels is None:
            return self._published(generator)
        return self._balanced(self.labels, POWERS[self.balance], generator)

    def _published(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.length, generator=generator)

    def _windowed(self, chunks: Tensor, generator: torch.Generator) -> Tensor:
        turns = torch.randperm(int(chunks.max()) + 1, generator=generator)
        behind = self.window * torch.rand(self.length, dtype=torch.float64, generator=generator)
        return torch.argsort(turns[chunks] + behind, stable=True)

    def _balanced(self, labels: Tensor, power: float, generator: torch.Generator) -> Tensor:
        """Go through each class in shuffled turns up to its share of `length`, cut the last turn, then shuffle all."""
        members = labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist())
        drawn = []
        for images, share in zip(members, shares([len(images) for images in members], power), strict=True):
            turns = [images[torch.randperm(len(images), generator=generator)] for _ in range(-(-share // len(images)))]
            drawn += [torch.cat(turns)[:share]] if turns else []
        order = torch.cat(drawn)
        return order[torch.randperm(len(order), generator=generator)]


def shares(counts: Sequence[int], power: float) -> list[int]:
    """`sum(counts)` shared out in the ratio of count ** power, in whole numbers; the largest remainders round up."""
    total, weights = sum(counts), [count**power for count in counts]
    every = sum(weights)
    exact = [total * weight / every for weight in weights]
    whole = [int(share) for share in exact]
    for place in sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])[: total - sum(whole)]:
        whole[place] += 1
    return whole


def occurrences(order: Tensor) -> Tensor:
    """How often each entry has occurred in `order` before: [5, 7, 5, 5] gives [0, 0, 1, 2]."""
    places = torch.argsort(order, stable=True)
    ranked = order[places]
    first = torch.searchsorted(ranked, ranked)
    counted = torch.empty_like(order)
    counted[places] = torch.arange(len(order)) - first
    return counted


class ShardSampler(SequentialSampler):
    """Every index exactly once over all ranks: rank r of w takes r, r + w, r + 2w, ...

    Unlike DistributedSampler it repeats no index to make the ranks even, so that accuracies are exact.
    It is a SequentialSampler because Lightning replaces all others under `overfit_batches`.
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class Loader(DataLoader[Any]):
    """A DataLoader that measures how long its user waits.

    Args:
        finish: applied to each batch in this process, where Lightning's hook does not run.
    """

    def __init__(self, *args: Any, finish: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finish = finish
        self.waited = 0.0
        """Seconds that its user has waited for batches so far."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = time.perf_counter()
        batches = super().__iter__()
        while (batch := next(batches, None)) is not None:
            self.waited += time.perf_counter() - start
            yield self.finish(batch) if self.finish else batch
            start = time.perf_counter()


class TrainLoader(Loader):
    """A loader that asks where to start only when its first batch is fetched.

    Lightning calls `iter()` before it has restored the epoch and the batch of a checkpoint. A loader
    that started its workers then would replay the wrong epoch.

    Args:
        position: returns (epoch, first batch) of the pass that is about to begin.
    """

    def __init__(self, *args: Any, position: Callable[[], tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.batch_sampler
        assert isinstance(sampler, TrainBatchSampler)
        sampler.epoch, sampler.first_batch = self.position()
        yield from super().__iter__()

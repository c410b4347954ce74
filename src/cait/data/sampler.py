"""The order of a run's images as a function of (seed, epoch, step), whatever the workers and the epochs before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from cait import seeds

Key = tuple[int, int, int]
"""(epoch, index, repeat): with the seed, all that the randomness of one training image depends on."""
POWERS = {"sqrt": 0.5, "full": 0.0}
"""A class of n images gets a share of an epoch that grows with n to this power."""


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


@dataclass(frozen=True)
class Balanced:
    """As many images as the set has, the classes' shares of them closer to each other.

    Images of a small class come several times. Within a class, the counts of two images differ by at most one.
    """

    labels: Tensor
    """The class of each image."""
    balance: str
    """One of `POWERS`."""

    @property
    def name(self) -> str:
        return f"balanced {self.balance}"

    def __call__(self, generator: torch.Generator) -> Tensor:
        """Go through each class in shuffled turns up to its share, cut the last turn, then shuffle all."""
        counts = self.labels.unique(return_counts=True)[1].tolist()
        members = self.labels.argsort(stable=True).split(counts)
        drawn = []
        for images, share in zip(members, shares(counts, POWERS[self.balance]), strict=True):
            for start in range(0, share, len(images)):
                turn = images[torch.randperm(len(images), generator=generator)]
                drawn.append(turn[: share - start])
        order = torch.cat(drawn)
        return order[torch.randperm(len(order), generator=generator)]


def shares(counts: Sequence[int], power: float) -> list[int]:
    """`sum(counts)` shared out in the ratio of count ** power, in whole numbers; the largest remainders round up."""
    total, weights = sum(counts), [count**power for count in counts]
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    for place in sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])[: total - sum(whole)]:
        whole[place] += 1
    return whole


class TrainBatchSampler(Sampler[list[Key]]):
    """Batches of one rank, in the order of the epoch, from any step on.

    With repeated augmentation (Hoffer et al., arXiv 1901.09335) each index of the order comes `repeats` times in a row.
    Rank r of w takes every w-th entry from r on, so the repeats of one image go to different ranks. As published, the
    epoch is cut at floor(len // 256 · 256 / w) entries a rank, so it is as long as without repeats. A last batch that
    is not full is left out. No two keys of an epoch are the same: an image that comes several times in an order has
    repeat numbers that continue.

    Args:
        order: of the images; None is the published one, a seeded permutation.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        repeats: int = 1,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
    ) -> None:
        self.length, self.batch_size, self.seed, self.repeats = length, batch_size, seed, repeats
        self.rank, self.world_size, self.order = rank, world_size, order or Published(length)
        self.epoch = self.first_batch = 0
        usable = length // 256 * 256 if repeats > 1 and length >= 256 else length
        self.entries = usable // world_size

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.entries // self.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = self.order(torch.Generator().manual_seed(seeds.epoch_order(self.seed, epoch)))
        counted = occurrences(order) * self.repeats
        for batch in range(self.first_batch, len(self)):
            entries = torch.arange(batch * self.batch_size, (batch + 1) * self.batch_size)
            entries = entries * self.world_size + self.rank  # of this rank among those of all ranks
            places, repeats = entries // self.repeats, entries % self.repeats
            indices, counts = order[places].tolist(), (repeats + counted[places]).tolist()
            yield [(epoch, index, repeat) for index, repeat in zip(indices, counts, strict=True)]


def occurrences(order: Tensor) -> Tensor:
    """How often each entry has occurred in `order` before: [5, 7, 5, 5] gives [0, 0, 1, 2]."""
    if order.bincount().max() == 1:  # sorting a million takes half a second
        return torch.zeros_like(order)
    places = torch.argsort(order, stable=True)
    ranked = order[places]
    counted = torch.empty_like(order)
    counted[places] = torch.arange(len(order)) - torch.searchsorted(ranked, ranked)
    return counted


class ShardSampler(SequentialSampler):
    """Every index exactly once over all ranks: rank r of w takes r, r + w, r + 2w, ...

    Unlike DistributedSampler it repeats no index to make the ranks even, so that accuracies are exact. It is a
    SequentialSampler because Lightning replaces all others under `overfit_batches`.
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size)
        super().__init__(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

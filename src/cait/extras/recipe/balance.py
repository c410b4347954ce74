"""An order in which the classes have more even shares of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POWERS = {"sqrt": 0.5, "full": 0.0}
"""A class of n images gets a share of an epoch that grows with n to this power."""


@dataclass(frozen=True)
class Balanced:
    """As many images as the set has, the classes' shares of them closer to each other; as `cait.data.sampler.Order`.

    Images of a small class come several times. Within a class, the counts of two images differ by at most one.
    `labels` are the class of each image, and `balance` is one of `POWERS`.
    """

    labels: Tensor
    balance: str

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

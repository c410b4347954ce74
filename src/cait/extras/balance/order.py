"""The order of an epoch in which the classes' shares are closer to each other than in the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POWERS = {"sqrt": 0.5, "full": 0.0}
"""A class of n images gets a share of an epoch that grows with n to this power."""


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
                drawn.append(
                    images[torch.randperm(len(images), generator=generator)][: share - start]
                )
        order = torch.cat(drawn)
        return order[torch.randperm(len(order), generator=generator)]


def shares(counts: Sequence[int], power: float) -> list[int]:
    """`sum(counts)` shared out in the ratio of count ** power, in whole numbers; the largest remainders round up."""
    total = sum(counts)
    weights = [count**power for count in counts]
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda label: whole[label] - exact[label])
    for label in by_remainder[: total - sum(whole)]:
        whole[label] += 1
    return whole

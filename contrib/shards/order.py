"""An order of the images that suits shards which come over a network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from contrib.shards import Shards


@dataclass(frozen=True)
class Windowed:
    """Images of at most `window` chunks at a time, as `cait.data.loader.Order`. It is not as published.

    The chunks are put into a seeded order, and each image follows its chunk's turn by a random distance below `window`
    chunks. So at most `window` chunks are in use at any moment, and each is used once in an epoch.
    """

    chunks: Tensor
    """The chunk of each image, counted from 0."""
    window: int

    @cached_property
    def name(self) -> str:
        layout = hashlib.sha256(self.chunks.numpy().tobytes()).hexdigest()[:16]
        return f"windowed over {self.window} of the chunks {layout}"

    def __call__(self, generator: torch.Generator) -> Tensor:
        turns = torch.randperm(int(self.chunks.max()) + 1, generator=generator)
        behind = self.window * torch.rand(len(self.chunks), dtype=torch.float64, generator=generator)
        return torch.argsort(turns[self.chunks] + behind, stable=True)


def choose(source: Any, shards: Shards) -> Windowed | None:
    """The windowed order, or None for the published one after saying what that costs over a network.

    Raises:
        UserError: the cache is too small for the windowed order.
    """
    if shards.order == "windowed":
        source.check_room(shards.window + 1)
        return Windowed(torch.from_numpy(source.train.chunk_of).long(), shards.window)
    if not source.all_fit:
        rank_zero_info(
            f"{source.root} does not fit into the cache, so each training image is a request of its own; "
            "see --data.order windowed and --data.cache_gb"
        )
    return None

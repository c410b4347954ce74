"""The multiply-adds of any network's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def forward_gmacs(model: nn.Module, shape: Sequence[int]) -> float | None:
    """10⁹ multiply-adds of a network's forward pass on an image of `shape`; None if it cannot run without weights."""
    tensors = [*model.parameters(), *model.buffers()]
    bare: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    bare |= {id(weight): nn.Parameter(bare[id(weight)], requires_grad=False) for weight in model.parameters()}
    try:
        copy = deepcopy(model, bare).eval()  # without weights
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy(torch.empty(1, *shape, device="meta"))
        return counter.get_total_flops() / 2e9
    except Exception:  # a network of the user's own may do anything
        return None

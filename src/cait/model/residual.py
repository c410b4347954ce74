"""The residual connection: x + stochastic depth(LayerScale(branch))."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth, drawn for each image: the branch is dropped with probability `rate`.

    Kept branches are divided by 1 - rate, so that the expectation is that of evaluation, where
    the branch is passed on as it is (Huang et al., arXiv 1603.09382).
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = 1.0 - self.rate
        mask = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask.div_(keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def layer_scale(embed_dim: int, init: float) -> nn.Parameter:
    """λ of LayerScale: one learnable factor for each channel of a residual branch, all initialised to ε."""
    return nn.Parameter(torch.full((embed_dim,), init))

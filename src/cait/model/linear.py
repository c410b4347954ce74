"""The last linear layer of a residual branch, together with the operations around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class GeluLinear(torch.autograd.Function):
    """gelu(x) Wᵀ + b. It saves x alone and computes gelu(x) again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = d_out.flatten(0, -2)
        d_weight = flat.t() @ F.gelu(x).flatten(0, -2)
        return torch.ops.aten.gelu_backward(d_out @ weight, x), d_weight, flat.sum(dim=0)


def scaled_linear(linear: nn.Linear, x: Tensor, gamma: Tensor | None, gelu: bool = False) -> Tensor:
    """γ · linear(x), or with `gelu` γ · linear(gelu(x)), for tokens x [B, N, d] and γ [d] or [1].

    γ(Wx + b) = (γW)x + γb: scaling the weights costs less than scaling the output, which would be read and
    saved once more. There are two exceptions. One or two class tokens are smaller than the weights. In
    float16 a small γ would make γW vanish.
    """
    weight: Tensor = linear.weight
    bias: Tensor = linear.bias
    if gamma is not None and x.dtype != torch.float16 and x.shape[-2] > 2:
        weight, bias, gamma = gamma[:, None] * weight, gamma * bias, None
    if gelu and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        y = GeluLinear.apply(x, weight.to(x.dtype), bias.to(x.dtype))
    else:
        y = F.linear(F.gelu(x) if gelu else x, weight, bias)
    return y if gamma is None else gamma * y

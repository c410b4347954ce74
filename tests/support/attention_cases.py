"""One layer of attention with talking heads: its inputs, and what a backend gives for them."""

from __future__ import annotations

import torch

from cait.model.talking_heads import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attention_case(heads: int, N: int, dtype: torch.dtype, width: int = 48, batch: int = 2) -> tuple:
    generator = torch.Generator().manual_seed(heads * 1000 + N)
    qkv = torch.randn(batch, N, 3, heads, width, generator=generator, dtype=torch.float64)
    proj_l, proj_w = torch.nn.Linear(heads, heads), torch.nn.Linear(heads, heads)
    for parameter in (*proj_l.parameters(), *proj_w.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * heads**-0.5
    d_out = torch.randn(batch, N, heads * width, generator=generator, dtype=torch.float64)
    place = dict(dtype=dtype, device=DEVICE)
    return qkv.to(**place).requires_grad_(), proj_l.to(**place), proj_w.to(**place), d_out.to(**place)


def attention_results(case: tuple, backend: str) -> list[torch.Tensor]:
    """Output and every gradient."""
    qkv, proj_l, proj_w, d_out = case
    out = attend(qkv, proj_l, proj_w, qkv.shape[-1] ** -0.5, backend)
    leaves = (qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

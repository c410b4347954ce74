"""The residual connection, the paper's subject: LayerScale and the forms that it is compared with.

Every form but "none" is x + drop_path(γ · branch(x)); they differ in γ and in the initial weights
of the branch:

| residual   | γ                                              | initial weights of the branch         |
|------------|------------------------------------------------|---------------------------------------|
| layerscale | λ ∈ R^d at ε, or uniform in [0, 2ε]            | as everywhere                         |
| plain      | none                                           | as everywhere                         |
| rezero     | a scalar at 0 (Bachlechner et al., 2003.04887) | as everywhere                         |
| skipinit   | the same (De & Smith, 2002.10444)              | as everywhere                         |
| scalar     | a scalar at ε                                  | as everywhere                         |
| fixup      | a scalar at 1 (Zhang et al., 1901.09321)       | `init_fixup`; scalar biases           |
| t-fixup    | none (Huang et al., ICML 2020)                 | `init_t_fixup`                        |
| none       | none, and no x: the branch alone               | as everywhere                         |

LayerNorm and warm-up stay in all of them, as in the paper's Table 1, where ReZero and SkipInit
therefore coincide. The authors' Fixup and T-Fixup are unreleased; here they follow their papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cait.model.config import CaiTConfig, DropPathMode

Kept = tuple[Tensor, Tensor] | None
"""Indices of the images whose branch is computed and the factor [1] of its output; None for a branch of all images."""

SCALAR_START = {"rezero": 0.0, "skipinit": 0.0, "fixup": 1.0}


def residual_scale(config: CaiTConfig) -> nn.Parameter | None:
    """γ of one branch: a vector [d] for LayerScale, [1] for a scalar, None for the forms without."""
    if config.residual == "layerscale":
        start = torch.full((config.embed_dim,), config.epsilon)
        if config.layer_scale_dist == "uniform":
            start = start.uniform_(0.0, 2 * config.epsilon)
        return nn.Parameter(start)
    if config.residual in ("plain", "t-fixup", "none"):
        return None
    return nn.Parameter(torch.full((1,), SCALAR_START.get(config.residual, config.epsilon)))


class GeluLinear(torch.autograd.Function):
    """gelu(x) Wᵀ + b that keeps x alone for the backward pass and computes gelu(x) there again."""

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
    """γ · linear(x), or γ · linear(gelu(x)): the last layer of a branch.

    γ is taken into the weights, γ(Wx + b) = (γW)x + γb, and its gradient then comes out of W's, so that
    the branch's output is neither read again nor kept. Not for the class token alone, or it and the
    distillation token, of which there is less than of weights; and not in float16, in which γW of a small
    γ would vanish.
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


class DropPath(nn.Module):
    """Stochastic depth, drawn for each image: the branch is dropped with probability `rate`.

    Kept branches are divided by 1 - rate, so that the expectation is that of evaluation, where
    the branch is passed on as it is (Huang et al., arXiv 1603.09382). With keep = 1 - rate, the modes:

    - mask: the branch is computed for every image, and multiplied by 0 where it is dropped; as published.
    - skip: the same distribution, each image on its own, but dropped images are left out of the
      computation, which saves a share of `rate` of the block. Drawn on the CPU, so that the number
      of images is known without waiting for a GPU.
    - subset: as in DINOv2, round(keep · B) images of the B are kept, at random, and divided by
      their share. The expectation is the same and so is the variance of one image; over the batch the
      draws are negatively correlated. The shapes are always the same, as torch.compile likes it.
    """

    def __init__(self, rate: float = 0.0, mode: DropPathMode = "mask") -> None:
        super().__init__()
        self.rate, self.mode = rate, mode

    def draw(self, x: Tensor) -> tuple[Tensor, float] | None:
        """Draw, on the CPU, the images of x whose branch is computed, and its factor; None leaves it to `forward`."""
        if self.mode == "mask" or self.rate == 0.0 or not self.training:
            return None
        keep, batch = 1.0 - self.rate, len(x)
        if self.mode == "subset":
            count = max(1, round(keep * batch))
            return torch.randperm(batch)[:count], batch / count
        drawn = torch.rand(batch) < keep
        if not drawn.any():  # one image, times 0: every parameter takes part in every step
            return torch.zeros(1, dtype=torch.long), 0.0
        return drawn.nonzero().squeeze(1), 1 / keep

    def forward(self, branch: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = 1.0 - self.rate
        mask = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask.div_(keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, mode={self.mode}"


def draw_kept(drop_paths: Sequence[DropPath], x: Tensor) -> list[Kept]:
    """What each of the layers keeps of the images x [B, ...] in this step, on the device of x.

    All indices travel in one copy from pinned memory, so that the host never waits for the device.
    """
    drawn = [drop_path.draw(x) for drop_path in drop_paths]
    indices = [draw[0] for draw in drawn if draw]
    if not indices:
        return [None] * len(drawn)
    together = torch.cat(indices)
    if x.device.type == "cuda":
        together = together.pin_memory().to(x.device, non_blocking=True)
    parts = iter(together.split([len(part) for part in indices]))
    factors = {factor: x.new_full((1,), factor) for factor in {draw[1] for draw in drawn if draw}}
    return [(next(parts), factors[draw[1]]) if draw else None for draw in drawn]


class ScalarBias(nn.Module):
    """Fixup's learnable scalar, added before a linear layer or an activation; starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def scalar_bias(config: CaiTConfig) -> nn.Module:
    """A `ScalarBias` under Fixup, else nothing: an Identity has no parameters and no name in a checkpoint."""
    return ScalarBias() if config.residual == "fixup" else nn.Identity()


def drop_path_rates(config: CaiTConfig) -> list[float]:
    """Stochastic depth of each self-attention block: the paper's uniform rate, or DeiT's linear growth from 0."""
    if config.drop_path_schedule == "uniform":
        return [config.drop_path_rate] * config.depth
    return [config.drop_path_rate * i / max(config.depth - 1, 1) for i in range(config.depth)]


@torch.no_grad()
def init_fixup(blocks: list[nn.Module], heads: list[nn.Linear]) -> None:
    """Fixup: classifiers and last layer of every branch 0, the branch's first layer times L^(-1/(2m-2)).

    L counts the residual branches, two a block; each has m = 2 layers in sequence (qkv and proj,
    fc1 and fc2), so the factor is L^(-1/2).
    """
    factor = (2 * len(blocks)) ** -0.5
    for head in heads:
        nn.init.zeros_(head.weight)
    for block in blocks:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                if name in ("attn.proj", "mlp.fc2"):
                    nn.init.zeros_(module.weight)
                elif name in ("attn.qkv", "attn.q", "attn.k", "attn.v", "mlp.fc1"):
                    module.weight.mul_(factor)


@torch.no_grad()
def init_t_fixup(blocks: list[nn.Module]) -> None:
    """T-Fixup: Xavier, then value, attention output and FFN weights times 0.67 · L^(-1/4) for L blocks."""
    factor = 0.67 * len(blocks) ** -0.25
    for block in blocks:
        for name, module in block.named_modules():
            if not isinstance(module, nn.Linear) or name in ("attn.proj_l", "attn.proj_w"):
                continue
            if name == "attn.qkv":
                for part in module.weight.chunk(3):
                    nn.init.xavier_uniform_(part)
                module.weight.chunk(3)[2].mul_(factor)
            else:
                nn.init.xavier_uniform_(module.weight)
                if name in ("attn.v", "attn.proj", "mlp.fc1", "mlp.fc2"):
                    module.weight.mul_(factor)

"""The residual connection, the paper's subject: LayerScale, its rivals, and stochastic depth.

Every form except "none" is x + drop_path(γ · branch(x)). They differ in γ and in the initial weights of the branch:

| residual   | γ                                              | initial weights of the branch         |
|------------|------------------------------------------------|---------------------------------------|
| layerscale | λ ∈ R^d at ε, or uniform in [0, 2ε]            | as everywhere                         |
| plain      | none                                           | as everywhere                         |
| rezero     | a scalar at 0 (Bachlechner et al., 2003.04887) | as everywhere                         |
| skipinit   | the same (De & Smith, 2002.10444)              | as everywhere                         |
| scalar     | a scalar at ε                                  | as everywhere                         |
| fixup      | a scalar at 1 (Zhang et al., 1901.09321)       | `scale_as_fixup`; scalar biases       |
| t-fixup    | none (Huang et al., ICML 2020)                 | `scale_as_t_fixup`                    |
| none       | none, and no x: the branch alone               | as everywhere                         |

All of them keep LayerNorm and warm-up, as in the paper's Table 1, so ReZero and SkipInit are the same here.
The authors did not release their Fixup and T-Fixup; these follow the original papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cait.model.config import CaiTConfig, DropPathMode

Sample = tuple[Tensor, Tensor] | None
"""The images of a batch whose branch is computed: their indices and the factor [1] of the branch. None means all."""

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


class DropPath(nn.Module):
    """Stochastic depth: drop the branch of each image with probability `rate` (Huang et al., arXiv 1603.09382).

    Kept branches are divided by keep = 1 - rate, so the expectation is that of evaluation, where nothing is
    dropped. The modes:

    - mask: compute the branch for every image and multiply the dropped ones by 0, as published.
    - skip: the same distribution, but compute the branch for the kept images only. The draw is on the CPU, so the
      number of images is known without a GPU sync.
    """

    def __init__(self, rate: float = 0.0, mode: DropPathMode = "mask") -> None:
        super().__init__()
        self.rate, self.mode = rate, mode

    def draw(self, x: Tensor) -> Tensor | None:
        """Indices of the images of x whose branch is computed, maybe none; None leaves the dropping to `forward`."""
        if self.mode == "mask" or self.rate == 0.0 or not self.training:
            return None
        return (torch.rand(len(x)) < 1.0 - self.rate).nonzero().squeeze(1)

    def forward(self, branch: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = 1.0 - self.rate
        mask = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask.div_(keep)


def draw_samples(drop_paths: Sequence[DropPath], x: Tensor) -> list[Sample]:
    """Draw the sample of each layer for this step, for the images x [B, ...] and on their device.

    All indices travel in one copy from pinned memory, so the host never waits for the device.
    """
    drawn = [drop_path.draw(x) for drop_path in drop_paths]
    # Where no image is kept, one is computed, times 0: DDP wants a gradient for every parameter in every step.
    indices = [kept if len(kept) else torch.zeros(1, dtype=torch.long) for kept in drawn if kept is not None]
    on_device = iter(_copied_together(indices, x.device))
    factors: dict[float, Tensor] = {}
    samples: list[Sample] = []
    for drop_path, kept in zip(drop_paths, drawn, strict=True):
        if kept is None:
            samples.append(None)
            continue
        factor = 1 / (1.0 - drop_path.rate) if len(kept) else 0.0
        if factor not in factors:
            factors[factor] = x.new_full((1,), factor)
        samples.append((next(on_device), factors[factor]))
    return samples


def _copied_together(tensors: list[Tensor], device: torch.device) -> Sequence[Tensor]:
    if not tensors or device.type == "cpu":
        return tensors
    joined = torch.cat(tensors)
    if device.type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=device.type == "cuda").split([len(part) for part in tensors])


def sampled(x: Tensor, sample: Sample) -> Tensor:
    """The images of x [B, ...] that are in the sample. The backward pass of x[indices] would sort them on a GPU."""
    return x if sample is None else x.index_select(0, sample[0])


def sampled_scale(gamma: Tensor | None, sample: Sample) -> Tensor | None:
    """γ times the factor of the sample; None means 1."""
    if sample is None:
        return gamma
    return sample[1] if gamma is None else sample[1] * gamma


def scaled_linear(linear: nn.Linear, x: Tensor, gamma: Tensor | None, gelu: bool = False) -> Tensor:
    """γ · linear(x), or with `gelu` γ · linear(gelu(x)), for tokens x [B, N, d] and γ [d] or [1].

    γ(Wx + b) = (γW)x + γb: scaling the weights costs less than scaling the output, except where a class token
    is smaller than the weights. In float16 a small γ would make γW vanish.
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


class ScalarBias(nn.Module):
    """Fixup's learnable scalar, added before a linear layer or an activation; starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def scalar_bias(config: CaiTConfig) -> nn.Module:
    """A `ScalarBias` under Fixup, else an Identity, which adds no name to a checkpoint."""
    return ScalarBias() if config.residual == "fixup" else nn.Identity()


def draw_weights(network: Any) -> None:
    """Draw linear weights, positions and class token of a CaiT from a normal of std .02 cut at ±2; set biases to 0.

    The patch projection keeps PyTorch's default, as in the released code.
    """
    for name in ("pos_embed", "cls_token"):
        if hasattr(network, name):
            nn.init.trunc_normal_(getattr(network, name), std=0.02)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    blocks = [*network.blocks, *network.blocks_token_only]
    if network.config.residual == "fixup":
        scale_as_fixup(blocks, network.head)
    elif network.config.residual == "t-fixup":
        scale_as_t_fixup(blocks)


@torch.no_grad()
def scale_as_fixup(blocks: list[Any], head: nn.Linear) -> None:
    """Fixup: set the classifier and the last layer of every branch to 0, scale its first layer by L^(-1/(2m-2)).

    L is the number of branches, two a block, of m = 2 layers each (qkv and proj, fc1 and fc2).
    """
    nn.init.zeros_(head.weight)
    for name, layer in _linear_layers(blocks):
        if name in ("attn.proj", "mlp.fc2"):
            nn.init.zeros_(layer.weight)
        elif name in ("attn.qkv", "attn.q", "attn.k", "attn.v", "mlp.fc1"):
            layer.weight.mul_((2 * len(blocks)) ** -0.5)


@torch.no_grad()
def scale_as_t_fixup(blocks: list[Any]) -> None:
    """T-Fixup: Xavier, then scale value, attention output and FFN weights by 0.67 · L^(-1/4) for L blocks."""
    factor = 0.67 * len(blocks) ** -0.25
    for name, layer in _linear_layers(blocks):
        if name == "attn.qkv":
            for part in layer.weight.chunk(3):
                nn.init.xavier_uniform_(part)
            layer.weight.chunk(3)[2].mul_(factor)
        elif name not in ("attn.proj_l", "attn.proj_w"):
            nn.init.xavier_uniform_(layer.weight)
            if name in ("attn.v", "attn.proj", "mlp.fc1", "mlp.fc2"):
                layer.weight.mul_(factor)


def _linear_layers(blocks: list[Any]) -> list[tuple[str, nn.Linear]]:
    """The linear layers of each block by their name in it."""
    return [pair for block in blocks for pair in block.named_modules() if isinstance(pair[1], nn.Linear)]

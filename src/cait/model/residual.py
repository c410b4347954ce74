"""The residual connection x + drop_path(γ · branch(x)): LayerScale, the paper's subject, and stochastic depth.

γ ∈ R^d starts at ε. Shapes: B images, N tokens, d = embed_dim.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cait.model.config import DropPathMode

Sample = tuple[Tensor, Tensor] | None
"""The images of a batch whose branch is computed: their indices and the factor [1] of the branch. None means all."""


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
        self.rate = rate
        self.mode = mode

    def draw(self, x: Tensor) -> Tensor | None:
        """Indices [kept] of the images of x [B, ...] to compute, maybe none; None leaves the dropping to `forward`."""
        if self.mode == "mask" or self.rate == 0.0 or not self.training:
            return None
        return (torch.rand(len(x)) < 1.0 - self.rate).nonzero().squeeze(1)

    def forward(self, branch: Tensor) -> Tensor:
        """[B, ...] to the same shape, each image multiplied by 0 or 1 / keep."""
        if self.rate == 0.0 or not self.training:
            return branch
        keep = 1.0 - self.rate
        mask = branch.new_empty(len(branch), *[1] * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask.div_(keep)


def draw_samples(drop_paths: Sequence[DropPath], x: Tensor) -> list[Sample]:
    """Draw the sample of each layer for this step, for the images x [B, ...] and on their device.

    All indices travel in one copy from pinned memory, so the host never waits for the device.
    """
    drawn = [drop_path.draw(x) for drop_path in drop_paths]
    # Where no image is kept, one is computed, times 0: DDP wants a gradient for every parameter in every step.
    indices = [
        kept if len(kept) else torch.zeros(1, dtype=torch.long)
        for kept in drawn
        if kept is not None
    ]
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
    on_cuda = device.type == "cuda"
    joined = torch.cat(tensors)
    if on_cuda:
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=on_cuda).split([*map(len, tensors)])


def sampled(x: Tensor, sample: Sample) -> Tensor:
    """The images of x [B, ...] in the sample, [kept, ...]. The backward pass of x[indices] would sort them on a GPU."""
    return x if sample is None else x.index_select(0, sample[0])


def sampled_scale(gamma: Tensor | None, sample: Sample) -> Tensor | None:
    """γ [d], or None for 1, times the factor of the sample [1]."""
    if sample is None:
        return gamma
    return sample[1] if gamma is None else sample[1] * gamma


def scaled_linear(
    linear: nn.Linear, x: Tensor, gamma: Tensor | None, function: Callable[..., Tensor] = F.linear
) -> Tensor:
    """γ · linear(x) for tokens x [B, N, d] and γ [d] or [1]; no γ means 1. `function` takes x, W and b.

    γ(Wx + b) = (γW)x + γb: scaling the weights costs less than scaling the output, except where a class token
    is smaller than the weights. In float16 a small γ would make γW vanish.
    """
    if gamma is not None and x.dtype != torch.float16 and x.shape[-2] > 2:
        return function(x, gamma[:, None] * linear.weight, gamma * linear.bias)
    out = function(x, linear.weight, linear.bias)
    return out if gamma is None else gamma * out


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W gelu(x) + b for x [..., d], W [e, d] and b [e]."""
    return F.linear(F.gelu(x), weight, bias)

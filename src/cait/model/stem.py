"""From images [B, C, H, W] to tokens [B, N, d]: the paper's projection of patches, or convolutions before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from cait.model.config import CaiTConfig


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each: the paper's stem."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_chans, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()


class ConvStem(nn.Module):
    """3×3 convolutions that halve the sides, then a projection to d channels. It is not the CaiT paper's.

    It is that of "Early Convolutions Help Transformers See Better", Xiao et al., arXiv 2106.14881. patch_size is
    2^k · f with f odd. There are k convolutions, whose channels double up to d, and the projection is f×f with stride
    f: 1×1 for a power of two, as in their paper. An odd patch_size has one convolution of d / 4 channels, which keeps
    the sides. Batch norm and ReLU follow each convolution.

    Args:
        pools: from the second on, convolve with stride 1 and halve by pooling, with at least d / 4 channels.
    """

    def __init__(self, config: CaiTConfig, pools: bool = False) -> None:
        super().__init__()
        d, factor, halvings = config.embed_dim, config.patch_size, 0
        while factor % 2 == 0:
            factor, halvings = factor // 2, halvings + 1
        layers, channels = list[nn.Module](), config.in_chans
        for above in reversed(range(halvings)) if halvings else [2]:
            is_pooled = pools and bool(layers)
            width = max(1, d // 2 ** (min(above, 2) if pools else above))
            stride = 2 if halvings and not is_pooled else 1
            layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if is_pooled:
                layers.append(nn.MaxPool2d(2))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, d, factor, stride=factor)

    def forward(self, images: Tensor) -> Tensor:
        # With the channels last, convolutions are faster on a CPU, and the tokens need no copy.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.project(self.layers(images)).flatten(2).transpose(1, 2).contiguous()


STEMS: dict[str, Callable[[CaiTConfig], nn.Module]] = {
    "patch": PatchEmbed,
    "conv": ConvStem,
    "pooled": partial(ConvStem, pools=True),
}
"""The values of `CaiTConfig.stem`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from cait.model.config import CaiTConfig


class ConvStem(nn.Module):
    """Images [B, C, H, W] to tokens [B, N, d]: 3×3 convolutions that halve the sides, and a projection to d channels.

    patch_size is 2^k · f with f odd. There are k convolutions, whose channels double up to d, and the projection is f×f
    with stride f: 1×1 for a power of two, as in the paper. An odd patch_size has one convolution of d / 4 channels,
    which keeps the sides. Batch norm and ReLU follow each convolution.

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
            pooled = pools and bool(layers)
            width, stride = max(1, d // 2 ** (min(above, 2) if pools else above)), 2 if halvings and not pooled else 1
            layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] * pooled
            channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, d, factor, stride=factor)

    def forward(self, images: Tensor) -> Tensor:
        # With the channels last, convolutions are faster on a CPU, and the tokens need no copy.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.project(self.layers(images)).flatten(2).transpose(1, 2).contiguous()


PooledStem = partial(ConvStem, pools=True)

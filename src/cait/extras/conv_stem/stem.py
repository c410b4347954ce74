"""The convolutional stem of "Early Convolutions Help Transformers See Better", Xiao et al., arXiv 2106.14881."""

from __future__ import annotations

from torch import Tensor, nn

from cait.model.config import CaiTConfig


class ConvStem(nn.Module):
    """Images [B, C, H, W] to tokens [B, N, d]: 3×3 convolutions that halve the sides, and a projection to d channels.

    patch_size is 2^k · f with f odd. There are k convolutions, whose channels double up to d, and the projection is f×f
    with stride f: 1×1 for a power of two, as in the paper. An odd patch_size has one convolution of d / 4 channels,
    which keeps the sides. Batch norm and ReLU follow each convolution.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, factor = config.embed_dim, config.patch_size
        strides = list[int]()
        while factor % 2 == 0:
            factor //= 2
            strides.append(2)
        widths = [d // 2**k for k in reversed(range(len(strides)))] if strides else [d // 4]
        layers, channels = list[nn.Module](), config.in_chans
        for width, stride in zip(widths, strides or [1], strict=True):
            convolution = nn.Conv2d(channels, max(1, width), 3, stride, padding=1, bias=False)
            channels = convolution.out_channels
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, d, factor, stride=factor)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.layers(images)).flatten(2).transpose(1, 2).contiguous()

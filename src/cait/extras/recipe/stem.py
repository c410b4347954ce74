"""What makes tokens of images in place of the paper's projection of patches: convolutions."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cait.model.cait import PatchEmbed
from cait.model.config import CaiTConfig


@dataclass(frozen=True)
class StemFields(CaiTConfig):
    """The fields of CaiT and its stem."""

    patches: ClassVar[str] = "cait.extras.recipe.stem:stem"

    stem: Literal["patch", "conv", "pooled"] = "patch"
    """What makes tokens of images: the paper's projection of patches, or `ConvStem`."""


def stem(config: Any) -> nn.Module:
    return PatchEmbed(config) if config.stem == "patch" else ConvStem(config)


class ConvStem(nn.Module):
    """3×3 convolutions that halve the sides, then a projection: [B, C, S, S] to [B, N, d]. It is not the CaiT paper's.

    It is that of "Early Convolutions Help Transformers See Better", Xiao et al., arXiv 2106.14881. patch_size is
    2^k · f with f odd. There are k convolutions, whose channels double up to d, and the projection is f×f with stride
    f: 1×1 for a power of two, as in their paper. An odd patch_size has one convolution of d / 4 channels, which keeps
    the sides. Batch norm and ReLU follow each convolution.

    The stem "pooled" convolves with stride 1 from the second on, with at least d / 4 channels, and halves by pooling.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        pools = config.stem == "pooled"
        d = config.embed_dim
        factor = config.patch_size
        halvings = 0
        while factor % 2 == 0:
            factor //= 2
            halvings += 1
        layers = list[nn.Module]()
        channels = config.in_chans
        for above in reversed(range(halvings)) if halvings else [2]:
            is_pooled = pools and bool(layers)
            width = max(1, d // 2 ** (min(above, 2) if pools else above))
            stride = 2 if halvings and not is_pooled else 1
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            if is_pooled:
                layers.append(nn.MaxPool2d(2))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, d, factor, stride=factor)

    def forward(self, images: Tensor) -> Tensor:
        # With the channels last, convolutions are faster on a CPU, and the tokens need no copy.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.project(self.layers(images)).flatten(2).transpose(1, 2).contiguous()

"""Attention maps as a figure: what the class token reads of an image.

Shapes: h heads, a grid of s × s patches, S = img_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cait.errors import UserError
from cait.extras import plots

CAPTION = (
    "Saliency: bright is what the class token reads most, in the first class-attention block; the mean of the heads. "
    "Each map has a scale of its own, from its least weight to its largest; ×1 is an even share over the patches."
)
PANEL, FEWEST, MOST = 1.75, 4, 8
"""Width of a panel in inches; panels in a row, one for each head between these numbers."""


def has_maps(network: Any) -> bool:
    """Whether the network has attention of a class token that can be shown."""
    return hasattr(network, "maps") and bool(getattr(network, "blocks_token_only", True))


@torch.no_grad()
def look(network: Any, image: Tensor) -> list[Tensor]:
    """The maps [h, s, s] of each class-attention block of a network that has `maps`, for its input [3, S, S].

    Raises:
        UserError: the network has no class-attention block.
    """
    maps = network.maps(image[None]).class_attention
    if not maps:
        raise UserError("the network has no class-attention block whose maps could be shown")
    side = math.isqrt(maps[0].shape[-1])  # of the patches; the class token comes first among the keys
    return [weights[0, :, 0, -(side**2) :].float().cpu().unflatten(-1, (side, side)) for weights in maps]


def draw(blocks: Sequence[Tensor], pixels: np.ndarray, title: str) -> Figure:
    """A row of an image and its saliency; below it the maps of each block and head.

    Args:
        blocks: as `look` returns them.
        pixels: what the network sees of it, uint8 [S, S, 3].
        title: above the figure.
    """
    heads = len(blocks[0])
    columns = min(max(heads, FEWEST), MOST)
    rows = 1 + math.ceil(len(blocks) * heads / columns)
    figure, grid = plots.grid(rows, columns, PANEL * columns, 1.25 * PANEL * rows)
    figure.suptitle(title, fontsize=9)
    for axes in grid.flat:
        axes.axis("off")
    _draw(grid[0, 0], pixels, f"as the network sees it\n{len(pixels)} × {len(pixels)} pixels")
    _draw(grid[0, 1], pixels, "saliency")
    extent = grid[0, 1].images[0].get_extent()
    saliency = blocks[0].mean(dim=0)
    grid[0, 1].imshow(saliency, cmap="inferno", interpolation="bicubic", extent=extent, alpha=0.6)
    panels = iter(grid[1:].flat)
    for block, weights in enumerate(blocks):
        for head, of_head in enumerate(weights):
            least, largest = (float(bound) * of_head.numel() for bound in of_head.aminmax())
            _draw(next(panels), of_head, f"block {block}, head {head}\n×{least:.2f} … ×{largest:.2f}")
    return figure


def _draw(axes: Axes, image: Any, title: str) -> None:
    axes.imshow(image, cmap="inferno", interpolation="nearest")
    axes.set_title(title, fontsize=8)

"""Maps as a figure: where a network looks in an image.

Shapes: h heads, a grid of s × s patches, S = img_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cait.extras import plots
from cait.extras.visualize import other_networks

SCALES = "Each map has a scale of its own, from its least weight to its largest; ×1 is an even share over the patches."
CAPTIONS = {
    "class attention": "Saliency: bright is what the class token reads most, in the first class-attention block; the "
    f"mean of the heads. {SCALES}",
    "attention": "Saliency: bright is what the class token reads most in the last block, or what all patches read if "
    f"the head takes no class token; the mean of the heads. {SCALES}",
    "Grad-CAM": f"Saliency: bright is what speaks for the most probable class, by Grad-CAM on the last maps. {SCALES}",
}
PANEL, FEWEST, MOST = 1.75, 4, 8
"""Width of a panel in inches; panels in a row, one for each head between these numbers."""


def kind(network: Any) -> str:
    """How this network's maps are made, a key of CAPTIONS."""
    if hasattr(network, "maps") and getattr(network, "blocks_token_only", True):
        return "class attention"
    return "attention" if other_networks.has_attention(network) else "Grad-CAM"


def look(network: Any, image: Tensor) -> list[Tensor]:
    """The maps [h, s, s] of each class-attention block, or of what stands for them, for an input [3, S, S]."""
    match kind(network):
        case "class attention":
            maps = network.maps(image[None]).class_attention
            side = math.isqrt(maps[0].shape[-1])  # of the patches; the class token comes first among the keys
            return [weights[0, :, 0, -(side**2) :].float().cpu().unflatten(-1, (side, side)) for weights in maps]
        case "attention":
            return other_networks.attention(network, image)
        case _:
            return other_networks.grad_cam(network, image)


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
            name = f"block {block}, head {head}" if heads > 1 else "the map"
            _draw(next(panels), of_head, f"{name}\n×{least:.2f} … ×{largest:.2f}")
    return figure


def _draw(axes: Axes, image: Any, title: str) -> None:
    axes.imshow(image, cmap="inferno", interpolation="nearest")
    axes.set_title(title, fontsize=8)

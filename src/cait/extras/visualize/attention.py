"""Attention maps as a figure: what the class token reads of an image.

Shapes: h heads, T class tokens (2 with a distillation token), a grid of s × s patches, S = img_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from cait.errors import UserError
from cait.extras import plots

TOKENS = ("class token", "distillation token")
CAPTION = (
    "Saliency: bright is what the class token reads most, in the first class-attention block; the mean of the heads. "
    "Each map has a scale of its own, from its least weight to its largest; ×1 is an even share over the patches."
)
PANEL, FEWEST, MOST = 1.75, 4, 8
"""Width of a panel in inches; panels in a row, one for each head between these numbers."""
MOST_PIXELS, MOST_LETTERS = 1000, 24
"""Longer side of a photograph, and length of a class's name, in a figure."""


class View(NamedTuple):
    """What a network makes of an image."""

    class_attention: list[Tensor]
    """[h, T, s, s] for each class-attention block."""
    self_attention: dict[int, Tensor]
    """[h, s, s] by the number of the block: what the patch `query` reads."""
    query: tuple[int, int]
    """Row and column of that patch."""
    probabilities: Tensor
    """[num_classes]"""


def on_grid(weights: Tensor) -> Tensor:
    """Attention weights [..., keys] of the patches alone, [..., s, s]; class tokens come first among the keys."""
    side = math.isqrt(weights.shape[-1])  # keys are s² or s² + T: neither T = 1 nor T = 2 makes another square
    return weights[..., -(side**2) :].unflatten(-1, (side, side))


def saliency(weights: Tensor, size: int) -> Tensor:
    """Weights [s, s], scaled from 0 (smallest) to 1 (largest) and resized to [size, size] with a bicubic filter."""
    least, largest = weights.aminmax()
    scaled = (weights - least) / (largest - least).clamp_min(torch.finfo(weights.dtype).tiny)
    resized = F.interpolate(scaled[None, None], size=(size, size), mode="bicubic", align_corners=False)
    return resized[0, 0].clamp(0, 1)


def has_maps(network: Any) -> bool:
    """Whether the network has attention of class tokens that can be shown."""
    return hasattr(network, "maps") and bool(getattr(network, "blocks_token_only", True))


@torch.no_grad()
def look(network: Any, image: Tensor, task: Any, blocks: Sequence[int], query: Sequence[int] | None) -> View:
    """Run a network that has `maps` on one image.

    Args:
        image: the network's input, [3, S, S].
        task: of the network, see `cait.train.metrics.OneClass`.
        blocks: numbers of the self-attention blocks to show, from 0.
        query: row and column of the patch whose self-attention is shown; None takes the centre.

    Raises:
        UserError: the network has no class-attention block, no such self-attention block, or no such patch.
    """
    images = image[None].to(next(network.parameters()).device)
    maps = network.maps(images)
    if not maps.class_attention:
        raise UserError("the network has no class-attention block whose maps could be shown")
    class_attention = [on_grid(weights[0].float().cpu()) for weights in maps.class_attention]
    count, side = len(maps.self_attention), class_attention[0].shape[-1]
    for block in blocks:
        if not 0 <= block < count:
            raise UserError(f"there is no self-attention block {block}: the network has {count}, from 0 on")
    row, column = query or (side // 2, side // 2)
    if not (0 <= row < side and 0 <= column < side):
        raise UserError(f"there is no patch {row},{column}: the grid is {side} × {side}, from 0,0 on")
    patch = row * side + column - side**2  # from the end, since class tokens come first
    self_attention = {block: on_grid(maps.self_attention[block][0, :, patch].float().cpu()) for block in blocks}
    probabilities = task.probabilities(network(images))[0].cpu()
    return View(class_attention, self_attention, (row, column), probabilities)


def likely(probabilities: Tensor, class_names: Sequence[str]) -> list[tuple[str, float]]:
    """The five most probable classes, the first one first."""
    best = probabilities.topk(min(5, len(probabilities)))
    return [(class_names[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def draw(view: View, photograph: Image.Image, pixels: np.ndarray, class_names: Sequence[str]) -> Figure:
    """A row of an image, its saliency and its likely classes; below it the maps of each block and head.

    Args:
        photograph: the whole image.
        pixels: what the network sees of it, uint8 [S, S, 3].
    """
    heads, tokens = view.class_attention[0].shape[:2]
    maps = _maps(view)
    columns = min(max(heads, FEWEST), MOST)
    above = math.ceil((3 + tokens) / columns) * columns  # the maps begin a row
    rows = (above + math.ceil(len(maps) / columns) * columns) // columns
    figure, grid = plots.grid(rows, columns, PANEL * columns, 1.25 * PANEL * rows)
    for axes in grid.flat:
        axes.axis("off")
    width, height = photograph.size
    whole = photograph.copy()
    whole.thumbnail((MOST_PIXELS, MOST_PIXELS))
    panels = iter(grid.flat)
    _draw(next(panels), whole, f"image\n{width} × {height} pixels")
    _draw(next(panels), pixels, f"as the network sees it\n{len(pixels)} × {len(pixels)} pixels")
    for token, weights in zip(TOKENS, view.class_attention[0].mean(dim=0), strict=False):
        axes = next(panels)
        _draw(axes, pixels, "saliency" if tokens == 1 else f"saliency of the\n{token}")
        axes.imshow(saliency(weights, len(pixels)), cmap="inferno", vmin=0, vmax=1, alpha=0.6)
    _draw_classes(next(panels), likely(view.probabilities, class_names))
    for axes, (label, weights) in zip(grid.flat[above:], maps, strict=False):
        least, largest = (float(bound) * weights.numel() for bound in weights.aminmax())
        _draw(axes, weights, f"{label}\n×{least:.2f} … ×{largest:.2f}")
        if label.startswith("self"):
            row, column = view.query
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, color="#56B4E9", linewidth=1.5))
    return figure


def _maps(view: View) -> list[tuple[str, Tensor]]:
    """The label of each map, and its weights [s, s]."""
    maps = []
    for block, weights in enumerate(view.class_attention):
        for token, of_token in zip(TOKENS, weights.unbind(1), strict=False):
            what = "" if weights.shape[1] == 1 else f"\n{token}"
            maps += [(f"class attention {block}, head {head}{what}", each) for head, each in enumerate(of_token)]
    for block, weights in view.self_attention.items():
        maps += [(f"self-attention {block}, head {head}", each) for head, each in enumerate(weights)]
    return maps


def _draw(axes: Axes, image: Any, title: str) -> None:
    axes.imshow(image, cmap="inferno", interpolation="nearest")
    axes.set_title(title, fontsize=8)


def _draw_classes(axes: Axes, best: Sequence[tuple[str, float]]) -> None:
    axes.barh(range(len(best)), [value for _, value in best], height=0.3, color="#56B4E9")
    for line, (name, value) in enumerate(best):
        shown = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
        axes.text(0, line - 0.35, f"{shown}  {value:.1%}", va="center", fontsize=8)
    axes.set(xlim=(0, 1), ylim=(4.5, -0.8))
    axes.set_title("most probable\nclasses", fontsize=8)

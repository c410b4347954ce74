"""Attention maps as figures: what the class token reads of an image, and where that is on the photograph.

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

import cait.extras.plots  # noqa: F401  # the style
from cait.errors import UserError

Box = tuple[float, float, float, float]
TOKENS = ("class token", "distillation token")
CAPTION = (
    "Saliency is the map of the first class-attention block: what the class token reads of each patch, from the least "
    "(dark) to the most (bright), resized to the image. Each map has a scale of its own. The numbers below it are its "
    "least and its largest weight, in multiples of 1 / number of patches. Self-attention is what the framed patch "
    "reads, after the heads are mixed; there a weight may be negative."
)
WIDTH, LEAST_COLUMNS = 8.0, 4
"""Width in inches of a figure with few heads, and the columns that it has room for."""
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
    least, largest = weights.amin(), weights.amax()
    scaled = (weights - least) / (largest - least).clamp_min(torch.finfo(weights.dtype).tiny)
    resized = F.interpolate(scaled[None, None], size=(size, size), mode="bicubic", align_corners=False)
    return resized[0, 0].clamp(0, 1)


@torch.no_grad()
def look(network: Any, image: Tensor, blocks: Sequence[int] = (), query: tuple[int, int] | None = None) -> View:
    """Run a network that has `maps` on one image.

    Args:
        image: the network's input, [3, S, S].
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
    probabilities = network(images)[0].float().softmax(dim=-1).cpu()
    return View(class_attention, self_attention, (row, column), probabilities)


def likely(probabilities: Tensor, class_names: Sequence[str]) -> list[tuple[str, float]]:
    """The five most probable classes, the first one first."""
    best = probabilities.topk(min(5, len(probabilities)))
    return [(class_names[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def figure(
    view: View, photograph: Image.Image, pixels: np.ndarray, box: Box | None, class_names: Sequence[str]
) -> Figure:
    """Draw what a network makes of an image.

    Above: the saliency of the first class-attention block on the photograph and on what the network sees, and the
    top classes. Below, in a column for each head: the same saliency, then the maps of each block.

    Args:
        pixels: what the network sees, uint8 [S, S, 3].
        box: (left, top, right, bottom) of that on the photograph, in its pixels; None if nobody knows.
    """
    first = view.class_attention[0]  # [h, T, s, s]
    heads, tokens, *_ = first.shape
    names = [f"\n{token}" for token in TOKENS] if tokens > 1 else [""]
    maps = {}  # [h, s, s] by the label of their row
    for number, weights in enumerate(view.class_attention):
        for name, of_token in zip(names, weights.unbind(1), strict=True):
            maps[f"class attention {number}{name}"] = of_token
    maps |= {f"self-attention {block}": weights for block, weights in view.self_attention.items()}

    rows, columns = 1 + len(maps), max(heads, LEAST_COLUMNS)
    width = max(WIDTH, columns * 0.9)
    heights = WIDTH / 4 + 0.3, rows * (width / columns + 0.15)
    whole = Figure(figsize=(width, sum(heights)), layout="constrained")
    above, below = whole.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]

    panels = [*["photograph"] * (box is not None), "seen", *TOKENS[:tokens], "classes"]
    upper = dict(zip(panels, above.subplots(1, len(panels)), strict=True))
    means = dict(zip(TOKENS, first.mean(dim=0), strict=False))
    if box is not None:
        _draw_photograph(upper["photograph"], photograph, saliency(means[TOKENS[0]], len(pixels)), box)
    upper["seen"].imshow(pixels)
    upper["seen"].set_title(f"as seen, {len(pixels)} pixels")
    _bare(upper["seen"])
    for token, weights in means.items():
        _draw_seen(upper[token], pixels, weights, token if tokens > 1 else "mean saliency")
    _draw_classes(upper["classes"], likely(view.probabilities, class_names))

    lower = below.subplots(rows, columns)
    for empty in lower[:, heads:].flat:
        empty.remove()
    lower = lower[:, :heads]
    for head, axes in enumerate(lower[0]):
        _draw_seen(axes, pixels, first[head, 0], f"head {head}")
    for line, weights in zip(lower[1:], maps.values(), strict=True):
        _draw_maps(line, weights)
    for line, label in zip(lower, ["saliency", *maps], strict=True):
        line[0].set_ylabel(label, fontsize=8)
    row, column = view.query
    for axes in lower[rows - len(view.self_attention) :].flat:
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, color="#56B4E9", lw=1.5))
    return whole


def _draw_photograph(axes: Axes, photograph: Image.Image, values: Tensor, box: Box) -> None:
    """The whole photograph, the saliency where the network saw it, a frame around that."""
    left, top, right, bottom = box
    width, height = photograph.size
    small = photograph.copy()
    small.thumbnail((MOST_PIXELS, MOST_PIXELS))
    _overlay(axes, small, (0, width, height, 0), values, (left, right, bottom, top))
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, color="#D55E00", lw=1, clip_on=False))
    axes.set(xlim=(0, width), ylim=(height, 0), title=f"image, {width} × {height}")


def _draw_seen(axes: Axes, pixels: np.ndarray, weights: Tensor, title: str) -> None:
    """The saliency of weights [s, s] over what the network sees."""
    size = len(pixels)
    _overlay(axes, pixels, (0, size, size, 0), saliency(weights, size), (0, size, size, 0))
    axes.set_title(title)


def _overlay(axes: Axes, image: Any, place: Box, values: Tensor, values_place: Box) -> None:
    """An image and values from 0 to 1 over it, each at (left, right, bottom, top)."""
    axes.imshow(image, extent=place)
    axes.imshow(values, extent=values_place, cmap="inferno", vmin=0, vmax=1, alpha=0.6, interpolation="bilinear")
    _bare(axes)


def _draw_maps(line: np.ndarray, maps: Tensor) -> None:
    """Maps [h, s, s], each scaled from its least weight to its largest; below it these two, in multiples of 1 / s²."""
    for axes, weights in zip(line, maps, strict=True):
        axes.imshow(weights, cmap="inferno")
        least, largest = (bound * weights.numel() for bound in weights.aminmax())
        axes.set_xlabel(f"{least:.3g} … {largest:.3g}", fontsize=7, labelpad=1)
        _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _draw_classes(axes: Axes, best: Sequence[tuple[str, float]]) -> None:
    axes.barh(range(len(best)), [value for _, value in best], height=0.3, color="#56B4E9")
    for line, (name, value) in enumerate(best):
        shown = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
        axes.text(0, line - 0.35, f"{shown}  {value:.1%}", va="center", fontsize=8, parse_math=False)
    _bare(axes)
    axes.set(title="classes", xlim=(0, 1), ylim=(4.5, -0.8))

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
from cait.train.metrics import OneClass

Box = tuple[float, float, float, float]
TOKENS = ("class token", "distillation token")
CAPTION = (
    "Saliency: bright is what the class token reads most, in the first class-attention block. Each map has a scale of "
    "its own. The frame on an image is what the network sees of it."
)
WIDTH, NARROW, LEAST_PANEL, LABELLED_PANEL = 8.0, 3.65, 0.9, 1.2
"""Widths in inches: of a figure with few heads, of one that a phone shows whole, of the smallest map,
and of one below its label."""
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


def has_maps(network: Any) -> bool:
    """Whether the network has attention of class tokens that can be shown."""
    return hasattr(network, "maps") and bool(getattr(network, "blocks_token_only", True))


@torch.no_grad()
def look(
    network: Any, image: Tensor, blocks: Sequence[int] = (), query: tuple[int, int] | None = None, task: Any = None
) -> View:
    """Run a network that has `maps` on one image.

    Args:
        image: the network's input, [3, S, S].
        blocks: numbers of the self-attention blocks to show, from 0.
        query: row and column of the patch whose self-attention is shown; None takes the centre.
        task: of the network, see `cait.train.metrics.OneClass`; None means one class an image.

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
    task = task or OneClass(0)
    probabilities = task.probabilities(network(images))[0].cpu()
    return View(class_attention, self_attention, (row, column), probabilities)


def likely(probabilities: Tensor, class_names: Sequence[str]) -> list[tuple[str, float]]:
    """The five most probable classes, the first one first."""
    best = probabilities.topk(min(5, len(probabilities)))
    return [(class_names[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


class Picture(NamedTuple):
    """An image, and what a network makes of it."""

    view: View
    photograph: Image.Image
    pixels: np.ndarray
    """What the network sees, uint8 [S, S, 3]."""
    box: Box | None
    """(left, top, right, bottom) of that on the photograph, in its pixels; None if nobody knows."""
    class_names: Sequence[str]

    def figure(self) -> Figure:
        """The panels of the image in a row, and below them the heads' maps."""
        rows, columns = self._grid()
        width = max(WIDTH, columns * self._least_panel())
        heights = width / len(self._panels()) + 0.4, rows * (width / columns + 0.2) + 0.5
        whole = Figure(figsize=(width, sum(heights)), layout="constrained")
        above, below = whole.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        self._draw_image(above, len(self._panels()))
        self._draw_heads(below)
        return whole

    def halves(self) -> tuple[Figure, Figure]:
        """The same as two figures: what the network sees, and the heads' maps, as narrow as can be read."""
        rows, columns = self._grid()
        image = Figure(figsize=(NARROW, -(-len(self._panels()) // 2) * (NARROW / 2 + 0.4)), layout="constrained")
        panel = max(self._least_panel(), min(NARROW / columns, NARROW / 2))
        heads = Figure(figsize=(max(NARROW, columns * panel), rows * (panel + 0.2) + 0.5), layout="constrained")
        self._draw_image(image, 2)
        self._draw_heads(heads)
        return image, heads

    def _panels(self) -> list[str]:
        tokens = self.view.class_attention[0].shape[1]
        return [*["photograph"] * (self.box is not None), "seen", *TOKENS[:tokens], "classes"]

    def _maps(self) -> dict[str, Tensor]:
        """[h, s, s] by label: of each block and token, then of self-attention."""
        maps = {}
        for number, weights in enumerate(self.view.class_attention):
            names = [f"\n{token}" for token in TOKENS] if weights.shape[1] > 1 else [""]
            for name, of_token in zip(names, weights.unbind(1), strict=True):
                maps[f"class attention {number}{name}"] = of_token
        return maps | {f"self-attention {block}": weights for block, weights in self.view.self_attention.items()}

    def _grid(self) -> tuple[int, int]:
        """Rows and columns of the heads' maps: the longer side goes across, so that no corner is left blank."""
        sides = len(self.view.class_attention[0]), 1 + len(self._maps())
        return min(sides), max(sides)

    def _least_panel(self) -> float:
        _, columns = self._grid()
        return LEAST_PANEL if columns == len(self.view.class_attention[0]) else LABELLED_PANEL

    def _draw_image(self, part: Any, columns: int) -> None:
        """The image, what the network sees of it, where it looks, and the likely classes."""
        panels, pixels = self._panels(), self.pixels
        grid = part.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for empty in grid.flat[len(panels) :]:
            empty.remove()
        axes = dict(zip(panels, grid.flat, strict=False))
        if self.box is not None:
            _draw_photograph(axes["photograph"], self.photograph, self.box)
        axes["seen"].imshow(pixels)
        axes["seen"].set_title(f"as the network sees it\n{len(pixels)} × {len(pixels)} pixels", fontsize=8)
        _bare(axes["seen"])
        first = self.view.class_attention[0]  # [h, T, s, s]
        for token, weights in zip(TOKENS, first.mean(dim=0), strict=False):
            of_which = f"saliency of the {token}" if first.shape[1] > 1 else "saliency"
            _draw_seen(axes[token], pixels, weights, f"{of_which}\nmean of the heads")
        _draw_classes(axes["classes"], likely(self.view.probabilities, self.class_names))

    def _draw_heads(self, part: Any) -> None:
        """For each head its saliency and its maps, with what their numbers mean."""
        first, maps = self.view.class_attention[0], self._maps()
        rows, columns = self._grid()
        across = len(first) == columns
        grid = part.subplots(rows, columns, squeeze=False)
        lines = grid if across else grid.T  # [1 + len(maps), h]
        for head, axes in enumerate(lines[0]):
            _draw_seen(axes, self.pixels, first[head, 0])
            (axes.set_title if across else axes.set_ylabel)(f"head {head}", fontsize=8)
        for line, weights in zip(lines[1:], maps.values(), strict=True):
            _draw_maps(line, weights)
        for line, label in zip(lines, ["saliency", *maps], strict=True):
            (line[0].set_ylabel if across else line[0].set_title)(label, fontsize=7 if across else 8)
        row, column = self.view.query
        for axes in lines[len(lines) - len(self.view.self_attention) :].flat:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, color="#56B4E9", lw=1.5))
        meaning = "Below a map: its least and largest weight;\n×1 is an even share over the "
        part.supxlabel(f"{meaning}{first[0, 0].numel()} patches", fontsize=8, x=0, ha="left")


def _draw_photograph(axes: Axes, photograph: Image.Image, box: Box) -> None:
    """The whole photograph as it is, and a frame around what the network sees."""
    left, top, right, bottom = box
    width, height = photograph.size
    small = photograph.copy()
    small.thumbnail((MOST_PIXELS, MOST_PIXELS))
    axes.imshow(small, extent=(0, width, height, 0))
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, color="#D55E00", lw=1, clip_on=False))
    axes.set(xlim=(min(0, left), max(width, right)), ylim=(max(height, bottom), min(0, top)))  # also what is padded
    axes.set_title(f"image\n{width} × {height} pixels", fontsize=8)
    _bare(axes)


def _draw_seen(axes: Axes, pixels: np.ndarray, weights: Tensor, title: str = "") -> None:
    """What the network sees, and over it the saliency of weights [s, s]."""
    place = (0, len(pixels), len(pixels), 0)
    axes.imshow(pixels, extent=place)
    values = saliency(weights, len(pixels))
    axes.imshow(values, extent=place, cmap="inferno", vmin=0, vmax=1, alpha=0.6, interpolation="bilinear")
    axes.set_title(title, fontsize=8)
    _bare(axes)


def _draw_maps(line: np.ndarray, maps: Tensor) -> None:
    """Maps [h, s, s], each scaled from its least weight to its largest; below it these two, in multiples of 1 / s²."""
    for axes, weights in zip(line, maps, strict=True):
        axes.imshow(weights, cmap="inferno")
        least, largest = (float(bound) * weights.numel() for bound in weights.aminmax())
        axes.set_xlabel(f"×{short(least)} … ×{short(largest)}", fontsize=8, labelpad=1)
        _bare(axes)


def short(number: float) -> str:
    """Two digits, none beyond hundredths; of a number from 10 on all before the point."""
    return f"{round(number, 2) + 0.0:.2g}" if abs(number) < 10 else f"{number:.0f}"  # + 0.0: no minus before a zero


def _bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _draw_classes(axes: Axes, best: Sequence[tuple[str, float]]) -> None:
    axes.barh(range(len(best)), [value for _, value in best], height=0.3, color="#56B4E9")
    for line, (name, value) in enumerate(best):
        shown = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
        axes.text(0, line - 0.35, f"{shown}  {value:.1%}", va="center", fontsize=8, parse_math=False)
    _bare(axes)
    axes.set(xlim=(0, 1), ylim=(4.5, -0.8))
    axes.set_title("most probable\nclasses", fontsize=8)

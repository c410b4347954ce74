"""Where a network looks in an image: class attention of CaiT, attention of timm's transformers, else Grad-CAM.

Shapes: h heads, a grid of s × s patches, S = img_size. All maps have the form of CaiT's, [h, s, s] for each block.
"""

import copy
import fnmatch
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from captum.attr import LayerGradCam
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from timm.utils import AttentionExtract
from torch import Tensor, nn

from cait.errors import UserError, told_as
from cait.extras import plots

SCALES = "Each map has a scale of its own, from its least weight to its largest; ×1 is an even share over the patches."
CAPTIONS = {
    "class attention": "Saliency: bright is what the class token reads most, in the first class-attention block; the "
    f"mean of the heads. {SCALES}",
    "attention": "Saliency: bright is what the class token reads most in the last block, or what all patches read if "
    f"the head takes no class token; the mean of the heads. {SCALES}",
    "Grad-CAM": f"Saliency: bright is what speaks for the most probable class, by Grad-CAM on the last maps. {SCALES}",
}
PANEL = 1.75
FEWEST = 4
MOST = 8
"""Width of a panel in inches; panels in a row, one for each head between these numbers."""

Call = tuple[nn.Module, torch.Size]
"""A module that was called, and the shape of its output."""


class NoMapsError(UserError):
    """This network has no maps."""


def kind(network: Any) -> str:
    """How this network's maps are made, a key of CAPTIONS."""
    if hasattr(network, "maps") and getattr(network, "blocks_token_only", True):
        return "class attention"
    drops = fnmatch.filter((name for name, _ in network.named_modules()), "*blocks.*attn_drop")
    return "attention" if drops and hasattr(network, "num_prefix_tokens") else "Grad-CAM"


@torch.no_grad()
def look(network: Any, image: Tensor) -> list[Tensor]:
    """The maps [h, s, s] of each class-attention block, or of what stands for them, for an input [C, S, S].

    Raises NoMapsError if the network has none.
    """
    match kind(network):
        case "class attention":
            with told_as(f"maps() of {type(network).__name__} fails"):
                maps = network.maps(image[None]).class_attention
            # of the patches; the class token comes first among the keys
            side = math.isqrt(maps[0].shape[-1])
            return [
                weights[0, :, 0, -(side**2) :].float().cpu().unflatten(-1, (side, side))
                for weights in maps
            ]
        case "attention":
            return attention(network, image)
        case _:
            return grad_cam(network, image)


def attention(network: nn.Module, image: Tensor) -> list[Tensor]:
    """What the class token reads in the last block, or all patches on average where the head takes no class token.

    By timm's `AttentionExtract`, for the network's input [C, S, S].
    """
    copied: Any = copy.deepcopy(network)  # its hooks stay
    for module in copied.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    # [1, h, tokens, tokens]
    *_, maps = AttentionExtract(copied, method="hook")(image[None]).values()
    prefix = copied.num_prefix_tokens
    rows = (
        maps[0, :, 0]
        if prefix and copied.global_pool == "token"
        else maps[0, :, prefix:].mean(dim=1)
    )
    side = math.isqrt(rows.shape[-1] - prefix)
    return [rows[..., prefix:].float().cpu().unflatten(-1, (side, side))]


def grad_cam(network: nn.Module, image: Tensor) -> list[Tensor]:
    """Grad-CAM (Selvaraju et al., arXiv 1610.02391) of the most probable class, by Captum, for the input [C, S, S].

    It is taken where the network makes its last maps [1, channels, s, s]. Raises NoMapsError if it makes none in its
    second half, as an MLP-Mixer, or has their channels last, as a Swin.
    """
    called: list[Call] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        called.append((module, output.shape if isinstance(output, Tensor) else torch.Size()))

    with ExitStack() as hooks:
        for module in network.modules():
            hooks.enter_context(module.register_forward_hook(note))
        best = int(network(image[None]).argmax())
    cam = LayerGradCam(network, _last_maker(called))
    with torch.enable_grad():
        pixels = image[None].clone().requires_grad_()  # the network's own weights may be frozen
        maps = cam.attribute(pixels, target=best, relu_attributions=True)
    heat = maps[0].detach().float().cpu()
    return [heat / heat.sum().clamp_min(torch.finfo(heat.dtype).tiny)]  # shares, as attention's are


def _last_maker(called: list[Call]) -> nn.Module:
    """The module that makes the last maps, from modules and the shapes of their outputs in the order of their calls."""
    weighted = [bool([*module.parameters(recurse=False)]) for module, _ in called]
    for i, (module, shape) in reversed([*enumerate(called)]):
        if len(shape) == 4 and shape[-1] > 1:
            if shape[-1] == shape[-2] and sum(weighted[: i + 1]) >= sum(weighted) / 2:
                return module
            break
    raise NoMapsError("this network makes no maps [channels, s, s] that Grad-CAM could show")


def draw(blocks: Sequence[Tensor], pixels: np.ndarray, title: str) -> Figure:
    """A row of an image, uint8 [S, S, 3], and its saliency; below it the maps of `look`, for each block and head."""
    heads = len(blocks[0])
    columns = min(max(heads, FEWEST), MOST)
    rows = 1 + math.ceil(len(blocks) * heads / columns)
    figure, grid = plots.grid(rows, columns, PANEL * columns, 1.25 * PANEL * rows)
    figure.suptitle(title, fontsize=9)
    for axes in grid.flat:
        axes.axis("off")
    image, saliency = grid[0, :2]
    _draw(image, pixels, f"as the network sees it\n{len(pixels)} × {len(pixels)} pixels")
    _draw(saliency, pixels, "saliency")
    extent = saliency.images[0].get_extent()
    saliency.imshow(
        blocks[0].mean(dim=0), cmap="inferno", interpolation="bicubic", extent=extent, alpha=0.6
    )
    panels = iter(grid[1:].flat)
    for block, maps in enumerate(blocks):
        for head, weights in enumerate(maps):
            even = weights.numel()
            name = f"block {block}, head {head}" if heads > 1 else "the map"
            _draw(
                next(panels),
                weights,
                f"{name}\n×{even * weights.min():.2f} … ×{even * weights.max():.2f}",
            )
    return figure


def _draw(axes: Axes, image: Any, title: str) -> None:
    axes.imshow(image, cmap="inferno", interpolation="nearest")
    axes.set_title(title, fontsize=8)

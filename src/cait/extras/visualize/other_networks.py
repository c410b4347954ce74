"""Where networks without class attention look: attention of timm's transformers, Grad-CAM of all others.

Both have the form of CaiT's maps, [h, s, s] for each block.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from typing import Any

import torch
from captum.attr import LayerGradCam
from timm.utils import AttentionExtract
from torch import Tensor, nn

from cait.errors import UserError


class NoMapsError(UserError):
    """This network has no maps."""


def has_attention(network: nn.Module) -> bool:
    """Whether the network is one of timm's transformers with attention among all patches."""
    drops = fnmatch.filter((name for name, _ in network.named_modules()), "*blocks.*attn_drop")
    return bool(drops) and hasattr(network, "num_prefix_tokens")


@torch.no_grad()
def attention(network: nn.Module, image: Tensor) -> list[Tensor]:
    """What the class token reads in the last block, or all patches on average where the head takes no class token.

    By timm's `AttentionExtract`, for the network's input [3, S, S].
    """
    copied: Any = copy.deepcopy(network)  # its hooks stay
    for module in copied.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    *_, maps = AttentionExtract(copied, method="hook")(image[None]).values()  # [1, h, tokens, tokens]
    prefix = copied.num_prefix_tokens
    reads_class = prefix and copied.global_pool == "token"
    rows = maps[0, :, 0] if reads_class else maps[0, :, prefix:].mean(dim=1)
    side = math.isqrt(rows.shape[-1] - prefix)
    return [rows[..., prefix:].float().cpu().unflatten(-1, (side, side))]


def grad_cam(network: nn.Module, image: Tensor) -> list[Tensor]:
    """Grad-CAM (Selvaraju et al., arXiv 1610.02391) of the most probable class, by Captum, for the input [3, S, S].

    It is taken where the network makes its last maps [1, channels, s, s].

    Raises:
        NoMapsError: it makes none in its second half, as an MLP-Mixer, or has their channels last, as a Swin.
    """
    called: list[tuple[nn.Module, torch.Size]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        called.append((module, output.shape if isinstance(output, Tensor) else torch.Size()))

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    try:
        with torch.no_grad():
            best = int(network(image[None]).argmax())
    finally:
        for hook in hooks:
            hook.remove()
    layer = _last_maker(called)
    with torch.enable_grad():
        pixels = image[None].clone().requires_grad_()  # the network's own weights may be frozen
        maps = LayerGradCam(network, layer).attribute(pixels, target=best, relu_attributions=True)
    return [maps[0].detach().float().cpu()]


def _last_maker(called: list[tuple[nn.Module, torch.Size]]) -> nn.Module:
    """The module that makes the last maps, from modules and the shapes of their outputs in the order of their calls."""
    has_weights = [any(True for _ in module.parameters(recurse=False)) for module, _ in called]
    for i, (module, shape) in reversed(list(enumerate(called))):
        if len(shape) == 4 and shape[-1] > 1:
            is_late = 2 * sum(has_weights[: i + 1]) >= sum(has_weights)
            if is_late and shape[-1] == shape[-2]:
                return module
            break
    raise NoMapsError("this network makes no maps [channels, s, s] that Grad-CAM could show")

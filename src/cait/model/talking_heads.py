"""Attention with talking heads, by one of several backends.

"Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. The maps of attention are mixed over the heads
before and after the softmax. All backends compute the same function.

Shapes: B images, N tokens, h heads (g after mixing), k = embed_dim / h channels a head.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cait import plugins
from cait.errors import UserError
from cait.model.config import attention_backends
from cait.model.recompute import TalkingHeads


class Backend(Protocol):
    """A backend that an extra adds, under the kind ATTENTION_BACKENDS; the class is called without arguments."""

    def refusal(self, shape: Shape) -> str | None:
        """What the backend needs and does not have here, or None."""

    def __call__(
        self, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]."""


class Shape(NamedTuple):
    """What a backend is asked for, besides the number of images."""

    device: str  # its type, such as "cuda"
    dtype: torch.dtype
    N: int
    heads: int
    k: int


def attend(qkv: Tensor, proj_l: nn.Linear, proj_w: nn.Linear, scale: float, backend: str = "auto") -> Tensor:
    """Attention among all tokens. proj_l mixes the heads before the softmax, proj_w after it.

    Args:
        qkv: queries, keys and values, [B, N, 3, h, k].
        backend: one of `cait.model.config.attention_backends`; "auto" is "recompute".

    Returns:
        [B, N, h·k].

    Raises:
        UserError: the backend that is asked for cannot run here.
    """
    if torch.compiler.is_exporting() or qkv.is_meta:  # only operators that every format knows; no backward pass
        backend = "reference"
    parameters = proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias
    if backend in ("auto", "recompute"):
        return TalkingHeads.apply(qkv, *parameters, scale)
    if backend != "reference":
        shape = qkv.device.type, qkv.dtype, qkv.shape[1], qkv.shape[3], qkv.shape[4]  # torch.compile takes no Shape
        if reason := _refusal(backend, *shape):
            raise UserError(f"attention_backend {backend} needs {reason}; take auto or reference")
        return _added[backend](qkv, *parameters, scale)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
    return (mixed_softmax((q * scale) @ k.transpose(-2, -1), proj_l, proj_w) @ v).transpose(1, 2).flatten(2)


_added: dict[str, Backend] = {}
"""The backends of extras that have been asked for."""


@torch.compiler.assume_constant_result  # torch.compile need not trace it
def _refusal(name: str, *shape: Any) -> str | None:
    """What a backend of an extra needs for the fields of a `Shape` and does not have, or None."""
    if name not in _added:
        _added[name] = plugins.load(plugins.merged("ATTENTION_BACKENDS")[name])()
    return _added[name].refusal(Shape(*shape))


def mixed_softmax(scores: Tensor, proj_l: nn.Linear, proj_w: nn.Linear) -> Tensor:
    """The weights of the values for scores [B, h, N, N], of the same shape."""
    maps = mix_heads(scores, proj_l.weight, proj_l.bias).softmax(dim=-1)
    return mix_heads(maps, proj_w.weight, proj_w.bias)


def mix_heads(maps_BhNN: Tensor, weight_hh: Tensor, bias_h: Tensor) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    One matrix product over [B, h, N·N]. nn.Linear would need the heads last, and so a copy of the maps.
    """
    batch, heads = maps_BhNN.shape[:2]
    mixed = torch.baddbmm(bias_h[:, None], weight_hh.expand(batch, heads, heads), maps_BhNN.flatten(2))
    return mixed.view_as(maps_BhNN)


def known_backend(name: str) -> str:
    """`name`, or "auto" with a warning if it is of an extra that is not here, as in a run from another machine."""
    if name in (known := attention_backends()):
        return name
    warnings.warn(f"attention_backend {name} is none of {', '.join(known)}: auto takes its place", stacklevel=2)
    return "auto"

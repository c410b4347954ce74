"""Which backend computes attention with talking heads, and the plain one.

"Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. The maps of attention are mixed over the heads
before and after the softmax. All backends compute the same function.

Shapes: B images, N tokens, h heads (g after mixing), k = embed_dim / h channels a head.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cait import plugins
from cait.errors import UserError
from cait.model.config import attention_backends
from cait.model.recompute import TalkingHeads, mix_heads


class Backend(Protocol):
    """A backend that an extra adds, under the kind ATTENTION_BACKENDS; the class is called without arguments."""

    def refusal(self, device: torch.device, dtype: torch.dtype, heads: int) -> str | None:
        """What the backend needs and does not have here, or None."""

    def is_best(self, device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> bool:
        """Whether "auto" takes it on this device, which is no CPU. Asked once for each shape, so it may try itself."""

    def __call__(
        self, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]."""


class Backends:
    """The backends of one network. Its blocks and its copies share them, so each shape is checked once.

    - "reference" leaves the backward pass to autograd.
    - "recompute" is `cait.model.recompute.TalkingHeads`: the same values in a third of the memory.
    - Extras add others, see `Backend`.
    - "auto" takes the first of an extra that is the best for the device and the shape, else "recompute".
    """

    def __init__(self) -> None:
        self._added: dict[str, Backend] = {}
        self._chosen: dict[tuple[torch.device, torch.dtype, int, int, int], str] = {}
        """What "auto" takes, by device, dtype, N, h and k."""

    def __deepcopy__(self, memo: Any) -> Backends:
        return self

    def attend(self, qkv: Tensor, proj_l: nn.Linear, proj_w: nn.Linear, scale: float, backend: str = "auto") -> Tensor:
        """Attention among all tokens. proj_l mixes the heads before the softmax, proj_w after it.

        Args:
            qkv: queries, keys and values, [B, N, 3, h, k].

        Returns:
            [B, N, h·k].

        Raises:
            UserError: the backend that is asked for cannot run here.
        """
        if torch.compiler.is_exporting() or qkv.is_meta:  # only operators that every format knows; no backward pass
            backend = "reference"
        elif backend == "auto" and qkv.device.type == "cpu":
            backend = "recompute"
        elif backend == "auto":
            backend = self.choose(qkv.device, qkv.dtype, qkv.shape[1], qkv.shape[3], qkv.shape[4])
        elif backend not in ("reference", "recompute"):
            self._require(backend, qkv.device, qkv.dtype, qkv.shape[3])
        given = qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias, scale
        if backend == "recompute":
            return TalkingHeads.apply(*given)
        if backend != "reference":
            return self._added[backend](*given)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
        maps = mix_heads((q * scale) @ k.transpose(-2, -1), proj_l.weight, proj_l.bias).softmax(dim=-1)
        return (mix_heads(maps, proj_w.weight, proj_w.bias) @ v).transpose(1, 2).flatten(2)

    @torch.compiler.assume_constant_result  # torch.compile need not trace a device's properties
    def choose(self, device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> str:
        """The backend that "auto" takes on a device other than a CPU."""
        shape = (device, dtype, N, heads, k)
        if shape not in self._chosen:
            best = (name for name in plugins.merged("ATTENTION_BACKENDS") if self._load(name).is_best(*shape))
            self._chosen[shape] = next(best, "recompute")
        return self._chosen[shape]

    @torch.compiler.assume_constant_result
    def _require(self, name: str, device: torch.device, dtype: torch.dtype, heads: int) -> None:
        if reason := self._load(name).refusal(device, dtype, heads):
            raise UserError(f"attention_backend {name} needs {reason}; take auto or recompute")

    def _load(self, name: str) -> Backend:
        if name not in self._added:
            self._added[name] = plugins.load(plugins.merged("ATTENTION_BACKENDS")[name])()
        return self._added[name]

    def chosen(self, device: torch.device) -> str:
        """What "auto" has taken on the device; "auto" until the first pass decides."""
        if device.type == "cpu" or not plugins.merged("ATTENTION_BACKENDS"):
            return "recompute"
        names = {name for shape, name in self._chosen.items() if shape[0] == device}
        return ", ".join(sorted(names - {"recompute"} or names)) or "auto"


def known_backend(name: str) -> str:
    """`name`, or "auto" with a warning if it is of an extra that is not here, as in a run from another machine."""
    if name in (known := attention_backends()):
        return name
    warnings.warn(f"attention_backend {name} is none of {', '.join(known)}: auto takes its place", stacklevel=2)
    return "auto"


def in_use(network: nn.Module, device: torch.device) -> str:
    """The backend that the attention of a network uses on `device`; empty if it has no talking heads."""
    layers: list[Any] = [layer for layer in network.modules() if isinstance(getattr(layer, "backends", None), Backends)]
    names = {layer.backends.chosen(device) if layer.backend == "auto" else layer.backend for layer in layers}
    return ", ".join(sorted(names))

"""Talking-heads attention, three ways: as written, with one map saved, and with a Triton kernel.

"Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. The maps of attention are mixed over the heads
before and after the softmax. All three backends compute the same function.

Shapes: B images, N tokens, h heads (g after mixing), k = embed_dim / h channels a head.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from cait.errors import UserError
from cait.model.recompute import TalkingHeads, mix_heads

FASTEST: dict[tuple[int, int], Literal["fused", "recompute"]] = {}
"""The fastest backend by compute capability, as measured by `benchmarks/kernel.py`. Nothing is measured yet.

Without a row "auto" takes "fused" on a GPU, because it moves half the bytes.
"""

CHECKED: dict[tuple[torch.device, torch.dtype, int, int, int], bool] = {}
"""Results of the check of "fused" in this process, by device, dtype, N, h and k."""


def talking_heads_attention(
    qkv: Tensor, proj_l: nn.Linear, proj_w: nn.Linear, scale: float, backend: str = "auto"
) -> Tensor:
    """Attention among all tokens. proj_l mixes the heads before the softmax, proj_w after it.

    Args:
        qkv: queries, keys and values, [B, N, 3, h, k].
        backend: "reference" leaves the backward pass to autograd. "recompute" is `TalkingHeads`: the same
            values in a third of the memory. "fused" is `cait.extras.fused.attention`: it needs a GPU, moves half the
            bytes and saves no map. "auto" takes the best for the device.

    Returns:
        [B, N, h·k].

    Raises:
        UserError: "fused" is asked for where it cannot run.
    """
    if torch.compiler.is_exporting() or qkv.is_meta:  # only operators that every format knows; no backward pass
        backend = "reference"
    if backend == "auto":
        backend = "fused" if qkv.is_cuda and _fused_serves(qkv.device, qkv.dtype, *_sizes(qkv)) else "recompute"
    elif backend == "fused":
        _require_fused(qkv.device, qkv.dtype, qkv.shape[3])
    given = qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias, scale
    if backend == "fused":
        from cait.extras.fused import attention  # imported here: not every machine has Triton

        return attention.talking_heads(*given)[0]
    if backend == "recompute":
        return TalkingHeads.apply(*given)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
    maps = mix_heads((q * scale) @ k.transpose(-2, -1), proj_l.weight, proj_l.bias).softmax(dim=-1)
    return (mix_heads(maps, proj_w.weight, proj_w.bias) @ v).transpose(1, 2).flatten(2)


def in_use(network: nn.Module, device: torch.device) -> str:
    """The backend that the attention of a network uses on `device`; empty if it has no talking heads.

    On a GPU "auto" is decided at the first pass; it stays "auto" until then.
    """
    ours = (module for module in network.modules() if getattr(module, "talking_heads", False) is True)  # not a layer
    backends = {getattr(module, "backend", "") for module in ours} - {""}
    if "auto" not in backends:
        return ", ".join(sorted(map(str, backends)))
    decided = [serves for key, serves in CHECKED.items() if key[0] == device]
    if device.type == "cuda" and not decided:
        return "auto"
    return "fused" if any(decided) else "recompute"


def _sizes(qkv: Tensor) -> tuple[int, int, int]:
    """N, h and k."""
    return qkv.shape[1], qkv.shape[3], qkv.shape[4]


@torch.compiler.assume_constant_result  # torch.compile need not trace a device's properties
def _require_fused(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    """Raise UserError where "fused" cannot run."""
    try:
        from cait.extras.fused import attention
    except ImportError as error:
        raise UserError(f"attention_backend fused needs Triton ({error}); take auto or recompute") from error
    if reason := attention.refusal(device, dtype, heads):
        raise UserError(f"attention_backend fused needs {reason}; take auto or recompute")


@torch.compiler.assume_constant_result
def _fused_serves(device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> bool:
    """Whether "fused" is the fastest here, runs, and is right. Check once and print the outcome."""
    key = (device, dtype, N, heads, k)
    if key not in CHECKED:
        CHECKED[key] = _is_fastest(device, dtype, heads) and _is_right(*key)
    return CHECKED[key]


def _is_fastest(device: torch.device, dtype: torch.dtype, heads: int) -> bool:
    try:
        _require_fused(device, dtype, heads)
    except UserError:
        return False
    return FASTEST.get(torch.cuda.get_device_capability(device), "fused") == "fused"


def _is_right(device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> bool:
    """Compare "fused" with the plain backend on one random image. It takes a second, mostly to compile."""
    from cait.extras.fused import attention

    bound = max(4 * torch.finfo(dtype).eps, 1e-4)
    try:
        found = attention.difference(device, dtype, N, heads, k)
    except Exception as error:  # no compiler, an old driver: train without it
        line = (str(error).splitlines() or [""])[0]
        warnings.warn(f"attention by recompute: fused failed its check ({type(error).__name__}: {line})", stacklevel=2)
        return False
    if not found <= bound:
        warnings.warn(f"attention by recompute: fused differs by {found:.1e}, {bound:.1e} is allowed", stacklevel=2)
        return False
    if os.environ.get("LOCAL_RANK", "0") == "0":
        told = f"{heads} heads, {N} tokens: differs by {found:.1e} from float64"
        print(f"attention by fused, {told}", file=sys.stderr, flush=True)
    return True

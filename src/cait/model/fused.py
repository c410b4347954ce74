"""Talking-heads attention by `cait.model.kernels`, as an operator of PyTorch.

Shapes: B images, N tokens, h heads, k channels a head. The operator is opaque to torch.compile, has
shapes for its fake mode and a gradient that is an operator as well, so that compilation, autocast and
activation checkpointing take it like any other. It is not registered for autocast, which would cast
W_l and W_w: qkv comes in the precision that the linear layer before gives, mixing is in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cait.errors import UserError
from cait.model import kernels

LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """What one program holds of a map, and how it is run."""

    rows: int
    """Tokens that it owns."""
    columns: int
    """Tokens that it takes in one turn of its loop."""
    warps: int
    stages: int


class Tiling(NamedTuple):
    forward: Tile
    weights: Tile
    queries: Tile
    keys: Tile


WIDE, TALL, SMALL, NARROW = Tile(32, 64, 8, 1), Tile(16, 64, 8, 1), Tile(16, 64, 4, 1), Tile(16, 32, 4, 1)
DEFAULTS: dict[int, Tiling] = {
    4: Tiling(WIDE, WIDE, WIDE, WIDE),
    8: Tiling(WIDE, SMALL, TALL, TALL),
    16: Tiling(TALL, TALL, TALL, TALL),
}
"""For up to so many heads: the largest tiles whose registers hardly spill, as compiled for compute capability 9.0."""

TILINGS: dict[tuple[tuple[int, int], torch.dtype, int, int, int], Tiling] = {}
"""Measured to be best, by compute capability, type, h, k and N. Empty: nothing has been measured yet.

Another tiling is another order of summation, so the choice must not change between two runs: it is
looked up here and never timed at run time. `benchmarks/kernel.py` times tiles and prints such rows.
"""


INTERPRETED = Tile(128, 128, 4, 1)
"""For Triton's interpreter: the fewer programs, the better."""


def default(heads: int) -> Tiling:
    return DEFAULTS[min(most for most in DEFAULTS if heads <= most)]


def tiling(qkv: Tensor) -> Tiling:
    """The measured one, else the default one if it fits the device, else the narrow one."""
    _, N, _, h, k = qkv.shape
    if not qkv.is_cuda:
        return Tiling(*[INTERPRETED] * 4)
    device = torch.cuda.get_device_properties(qkv.device)
    measured = TILINGS.get(((device.major, device.minor), qkv.dtype, h, k, N))
    if measured:
        return measured
    return default(h) if _fits(default(h), h, k, qkv.dtype, device) else Tiling(*[NARROW] * 4)


def _fits(tiles: Tiling, heads: int, k: int, dtype: torch.dtype, device: Any) -> bool:
    return max(shared_memory(tile, heads, k, dtype) for tile in tiles) <= device.shared_memory_per_block_optin


def shared_memory(tile: Tile, heads: int, k: int, dtype: torch.dtype) -> int:
    """Bytes a program takes at most without stages: two sets of rows, one of columns, and what is on its way."""
    return heads * _width(k) * dtype.itemsize * (2 * tile.rows + tile.columns) + 2**14


def _width(k: int) -> int:
    """Channels of a head as a tile has them."""
    return max(16, triton.next_power_of_2(k))


def refusal(qkv: Tensor) -> str | None:
    """What the kernels need and qkv has not, or None."""
    h, k = qkv.shape[3:]
    return _refusal(qkv.device, qkv.dtype, h, k)


@torch.compiler.assume_constant_result  # torch.compile need not follow a device's properties
def _refusal(at: torch.device, dtype: torch.dtype, h: int, k: int) -> str | None:
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"bfloat16, float16 or float32, not {name}"
    if h > 16 or k > 64:
        return f"at most 16 heads of at most 64 channels, not {h} of {k}"
    if at.type != "cuda":
        if isinstance(kernels.forward_kernel, triton.JITFunction):
            return f"a CUDA device, not {at.type} (or TRITON_INTERPRET=1, for tests)"
        return None
    device = torch.cuda.get_device_properties(at)
    if device.major < 8:
        return "a GPU of compute capability 8.0 or newer"
    if not _fits(Tiling(*[NARROW] * 4), h, k, dtype, device):
        return f"more shared memory than {device.name} has for {h} heads of {name}"
    return None


def _prepared(qkv: Tensor) -> Tensor:
    """Heads and channels side by side, as the linear layer leaves them; images may be anywhere.

    So may tokens, but for the 32 bits that the kernels count them in, within an image.
    """
    _, N, _, h, k = qkv.shape
    near = N * qkv.stride(1) < 2**31
    return qkv if near and qkv.stride()[2:] == (h * k, k, 1) else qkv.contiguous()


def constants(kernel: Any, tile: Tile, heads: int, k: int) -> dict[str, int]:
    """What a kernel is compiled for."""
    group = heads_at_once(heads)
    every = dict(H=heads, K=k, BK=_width(k), G=group, LEVELS=(group * heads - 1).bit_length())
    every |= dict(M=tile.rows, BN=tile.columns, WARPS=tile.warps)
    return {name: value for name, value in every.items() if name in kernel.arg_names}


def heads_at_once(heads: int) -> int:
    """Of the heads g, those whose gradients of W_l and W_w one program sums: h² sums have no place in its registers."""
    return max(group for group in range(1, 5) if heads % group == 0)


def _launch(kernel: Any, tile: Tile, qkv: Tensor, *arguments: Tensor, parts: int = 1) -> None:
    """
    Raises:
        UserError: the tile does not fit, whatever `shared_memory` said.
    """
    B, N, _, h, k = qkv.shape
    grid = (triton.cdiv(N, tile.rows) * B, parts)
    numbers = (N, qkv.stride(0), qkv.stride(1), 0)
    options = constants(kernel, tile, h, k) | dict(num_warps=tile.warps, num_stages=tile.stages)
    try:
        with torch.cuda.device_of(qkv):
            kernel[grid](qkv, *arguments, *numbers, **options)
    except OutOfResources as error:
        needs = f"{error.required} of {error.name}, of which there is {error.limit}"
        raise UserError(f"attention_backend fused needs {needs}; take auto or recompute") from error


def _token_sums(x: Tensor) -> Tensor:
    """[B, N, h, k] to [B, h, k] in float32."""
    return x.sum(dim=1, dtype=torch.float32)


OPERATOR = "cait::talking_heads"


@torch.library.custom_op(
    OPERATOR,
    mutates_args=(),
    schema="(Tensor qkv, Tensor weight_l, Tensor bias_l, Tensor weight_w, Tensor bias_w, float scale)"
    " -> (Tensor, Tensor)",
)
def talking_heads(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to the output [B, N, h·k] and lse [B, h, N] in float32."""
    qkv = _prepared(qkv)
    out, lse = _outputs(qkv)
    shift = bias_w.float()[:, None] * _token_sums(qkv[:, :, 2])
    _launch(kernels.forward_kernel, tiling(qkv).forward, qkv, *_mixers(weight_l, weight_w, scale), shift, out, lse)
    return out, lse


@talking_heads.register_fake
def _(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _outputs(qkv)


def _outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    B, N, _, h, k = qkv.shape
    return qkv.new_empty(B, N, h * k), qkv.new_empty(B, h, N, dtype=torch.float32)


def _mixers(weight_l: Tensor, weight_w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As the kernels take them; W_l leads to logarithms to base 2."""
    return (weight_l.float() * (scale * LOG2_E)).contiguous(), weight_w.float().contiguous()


@torch.library.custom_op(
    f"{OPERATOR}_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor qkv, Tensor lse, Tensor weight_l, Tensor weight_w, Tensor bias_w, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def talking_heads_backward(
    d_out: Tensor, qkv: Tensor, lse: Tensor, weight_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, weight_l, weight_w and bias_w."""
    qkv, d_out, lse = _prepared(qkv), d_out.contiguous(), lse.contiguous()
    B, N, _, h, k = qkv.shape
    _, weights, queries, keys = tiling(qkv)
    mixers = _mixers(weight_l, weight_w, scale)
    D, d_qkv = torch.empty_like(lse), qkv.new_empty(qkv.shape)
    group = heads_at_once(h)
    shares = lse.new_empty(2, B, triton.cdiv(N, weights.rows), h // group, h, group)  # of dW_lᵀ and of dW_w
    _launch(kernels.weights_kernel, weights, qkv, d_out, lse, *mixers, D, *shares, parts=h // group)
    _launch(kernels.queries_kernel, queries, qkv, d_out, lse, D, *mixers, d_qkv)
    sum_v, sum_dO = _token_sums(qkv[:, :, 2]), _token_sums(d_out.view(B, N, h, k))
    shift = bias_w.float()[:, None] * sum_dO
    _launch(kernels.keys_kernel, keys, qkv, d_out, lse, D, *mixers, shift, d_qkv)
    d_weight_l, d_weight_w = (share.sum(dim=(0, 1)).transpose(0, 1).reshape(h, h) for share in shares)
    d_bias_w = (sum_v * sum_dO).sum(dim=(0, 2))
    gradients = (d_weight_l.T * scale, d_weight_w, d_bias_w)
    parameters = (weight_l, weight_w, bias_w)
    return d_qkv, *(grad.to(of.dtype).contiguous() for grad, of in zip(gradients, parameters, strict=True))


@talking_heads_backward.register_fake
def _(
    d_out: Tensor, qkv: Tensor, lse: Tensor, weight_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, ...]:
    return qkv.new_empty(qkv.shape), *(of.new_empty(of.shape) for of in (weight_l, weight_w, bias_w))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, weight_l, bias_l, weight_w, bias_w, ctx.scale = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(qkv, lse, weight_l, bias_l, weight_w, bias_w)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, lse, weight_l, bias_l, weight_w, bias_w = ctx.saved_tensors
    d_qkv, d_weight_l, d_weight_w, d_bias_w = talking_heads_backward(
        d_out, qkv, lse, weight_l, weight_w, bias_w, ctx.scale
    )
    return d_qkv, d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w, None


talking_heads.register_autograd(_gradients, setup_context=_save)

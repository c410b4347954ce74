"""Talking-heads attention as a PyTorch operator: cuBLAS's products with `contrib.fused.kernels` between them.

Shapes: B images, N tokens, h heads, k channels a head; a map is [B·h, N, columns]. The forward pass computes
S = scale · Q Kᵀ as a batched product, turns S into A in place with one kernel, and computes
O = A V + b_w Σ_n V as a product. The backward pass computes S again and dA = dO Vᵀ, turns them into dS and A
in place with one kernel, and computes the products

    dV = Aᵀ dO + b_w Σ_m dO     dQ = scale · dS K     dK = scale · dSᵀ Q

No map outlives either pass. b_l is the same for a whole row, so the softmax cancels it. b_w touches no map.
torch.compile does not look into the operator. Its gradient is an operator too, so activation checkpointing
takes it like any other. It is not registered for autocast, which would cast W_l and W_w; qkv has the
precision of the linear layer before it.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from contrib.fused import kernels


class Tile(NamedTuple):
    """The part of a map that a program holds at a time, and how the program runs."""

    columns: int
    """If a row has more columns, the program walks over it twice."""
    warps: int
    stages: int


class Tiling(NamedTuple):
    forward: Tile
    backward: Tile


ROWS = 16 if isinstance(kernels.forward_kernel, triton.JITFunction) else 256
"""Rows of a tile: the fewest that a tensor core takes. The interpreter is faster with fewer, larger tiles."""

PROGRAMS = 4096  # at most; each takes several tiles in turn, loads W once and stores one share of dW_l and dW_w


def padded(N: int) -> int:
    """Columns of a map on a GPU: a multiple of 16, so that cuBLAS and Triton read aligned rows."""
    return -(-N // 16) * 16


def heads_first(qkv: Tensor, rows: int) -> Tensor:
    """[B, N, 3, h, k] to a contiguous [3, B·h, rows, k]. Rows beyond N are 0, and so are the maps there."""
    B, N, _, h, k = qkv.shape
    heads = qkv.permute(2, 0, 3, 1, 4)
    if rows > N:
        heads = qkv.new_empty(3, B, h, rows, k)
        heads[:, :, :, N:] = 0
        heads[:, :, :, :N] = qkv.permute(2, 0, 3, 1, 4)
    return heads.reshape(3, B * h, rows, k).contiguous()


def default(N: int, dtype: torch.dtype) -> Tiling:
    """The tiles that compile to the fewest instructions without spilling registers."""
    columns = max(64, triton.next_power_of_2(padded(N)))
    walk = Tile(64, 2, 2)
    if columns > 256:
        return Tiling(Tile(128, 2, 2), walk)
    whole = Tile(columns, columns // 64, 1)
    return Tiling(whole, walk if dtype == torch.float32 else whole._replace(stages=2))


def refusal(device: torch.device, dtype: torch.dtype, heads: int) -> str | None:
    """What the kernels need and do not have here, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"bfloat16, float16 or float32, not {str(dtype).removeprefix('torch.')}"
    if heads > 16:
        return f"at most 16 heads, not {heads}"
    if device.type != "cuda":
        if isinstance(kernels.forward_kernel, triton.JITFunction):
            return f"a CUDA device, not {device.type} (or TRITON_INTERPRET=1, for tests)"
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU of compute capability 8.0 or newer"
    return None


def constants(kernel: Any, tile: Tile, heads: int, columns: int) -> dict[str, Any]:
    """Compile-time constants of a kernel."""
    every = dict(H=heads, R=ROWS, C=tile.columns, ONCE=columns <= tile.columns, WARPS=tile.warps)
    return {name: value for name, value in every.items() if name in kernel.arg_names}


def options(tile: Tile) -> dict[str, Any]:
    return dict(num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)


def turns(maps: Tensor, heads: int) -> tuple[int, int]:
    """Number of programs, and of tiles for each; both depend on the shape alone."""
    tiles = triton.cdiv(maps.shape[0] // heads * maps.shape[1], ROWS // heads)
    each = max(1, triton.cdiv(tiles, PROGRAMS))
    return triton.cdiv(tiles, each), each


def _launch(kernel: Any, tile: Tile, heads: int, *arguments: Tensor) -> None:
    """Run a kernel on its arguments; the first is the maps [B·h, N, columns]."""
    maps = arguments[0]
    images, (_, N, columns) = maps.shape[0] // heads, maps.shape
    programs, each = turns(maps, heads)
    if programs:
        with torch.cuda.device_of(maps):
            kernel[(programs,)](
                *arguments,
                images * N,
                N,
                columns,
                each,
                **constants(kernel, tile, heads, columns),
                **options(tile),
            )


def mix(maps: Tensor, weight_l: Tensor, weight_w: Tensor) -> None:
    """Turn S into A, in place."""
    weights = weight_l.float().contiguous(), weight_w.float().contiguous()
    _launch(
        kernels.forward_kernel,
        default(maps.shape[1], maps.dtype).forward,
        len(weight_l),
        maps,
        *weights,
    )


def mix_backward(maps: Tensor, d_maps: Tensor, weight_l: Tensor, weight_w: Tensor) -> Tensor:
    """Turn S into dS and dA into A, in place; return dW_l and dW_w, [2, h, h]."""
    weights = weight_l.float().contiguous(), weight_w.float().contiguous()
    h, queries = len(weight_l), ROWS // len(weight_l)
    shares = maps.new_empty(turns(maps, h)[0], 2, ROWS, ROWS, dtype=torch.float32)
    _launch(
        kernels.backward_kernel,
        default(maps.shape[1], maps.dtype).backward,
        h,
        maps,
        d_maps,
        *weights,
        shares,
    )
    blocks = shares.sum(dim=0)[:, : queries * h, : queries * h].reshape(2, queries, h, queries, h)
    return blocks.diagonal(dim1=1, dim2=3).sum(dim=-1)  # each query of a tile mixes its own heads


def _token_sums(x: Tensor) -> Tensor:
    """[B, N, h, k] to [B, 1, h, k] in float32."""
    return x.sum(dim=1, keepdim=True, dtype=torch.float32)


def _tokens_first(heads: Tensor, like: Tensor) -> Tensor:
    """View [B·h, N or more, k] as [B, N, h, k], the shape of `like`."""
    B, N, h, k = like.shape
    return heads.view(B, h, heads.shape[1], k)[:, :, :N].transpose(1, 2)


def no_autocast(x: Tensor) -> Any:
    """Turn autocast off on the device of x."""
    device = x.device.type
    return (
        torch.autocast(device, enabled=False)
        if torch.amp.is_autocast_available(device)
        else nullcontext()
    )


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a b for stacks of matrices, scaled before rounding."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


OPERATOR = "cait::talking_heads"


@torch.library.custom_op(OPERATOR, mutates_args=())
def talking_heads(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to the output [B, N, h·k] and heads [3, B·h, columns, k].

    The heads are qkv in the layout of the products. The backward pass needs them in place of qkv.
    """
    B, N, _, h, k = qkv.shape
    heads = heads_first(qkv, padded(N))
    q, keys, v = heads
    out = qkv.new_empty(B, N, h, k)
    shift = bias_w.float()[:, None] * _token_sums(_tokens_first(v, out))
    with no_autocast(qkv):
        maps = scaled_product(q[:, :N], keys.transpose(1, 2), scale)
        mix(maps, weight_l, weight_w)
        torch.add(_tokens_first(maps @ v, out), shift.to(out.dtype), out=out)
    return out.flatten(2), heads


@talking_heads.register_fake
def _(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    B, N, _, h, k = qkv.shape
    return qkv.new_empty(B, N, h * k), qkv.new_empty(3, B * h, padded(N), k)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def talking_heads_backward(
    d_out: Tensor, heads: Tensor, weight_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, weight_l, weight_w and bias_w."""
    (B, N, _), h, k = d_out.shape, len(weight_l), heads.shape[-1]
    d_out = d_out.view(B, N, h, k)
    dO = d_out.transpose(1, 2).reshape(B * h, N, k)
    q, keys, v = heads
    q = q[:, :N]
    d_qkv = heads.new_empty(B, N, 3, h, k)
    dQ, dK, dV = d_qkv.unbind(2)
    sum_v, sum_dO = _token_sums(_tokens_first(v, dV)), _token_sums(d_out)
    shift = bias_w.float()[:, None] * sum_dO
    with no_autocast(heads):
        maps, d_maps = scaled_product(q, keys.transpose(1, 2), scale), dO @ v.transpose(1, 2)
        d_weight_l, d_weight_w = mix_backward(maps, d_maps, weight_l, weight_w)
        torch.add(_tokens_first(d_maps.transpose(1, 2) @ dO, dV), shift.to(dV.dtype), out=dV)
        dQ.copy_(_tokens_first(scaled_product(maps, keys, scale), dQ))
        dK.copy_(_tokens_first(scaled_product(maps.transpose(1, 2), q, scale), dK))
    d_bias_w = (sum_v * sum_dO).sum(dim=(0, 1, 3))
    gradients = (d_weight_l, d_weight_w, d_bias_w)
    parameters = (weight_l, weight_w, bias_w)
    return d_qkv, *(
        grad.to(of.dtype, copy=True) for grad, of in zip(gradients, parameters, strict=True)
    )


@talking_heads_backward.register_fake
def _(
    d_out: Tensor, heads: Tensor, weight_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> tuple[Tensor, ...]:
    (B, N, _), h, k = d_out.shape, len(weight_l), heads.shape[-1]
    return heads.new_empty(B, N, 3, h, k), *(
        of.new_empty(of.shape) for of in (weight_l, weight_w, bias_w)
    )


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, weight_l, bias_l, weight_w, bias_w, ctx.scale = inputs
    _, heads = output
    ctx.mark_non_differentiable(heads)
    ctx.save_for_backward(heads, weight_l, bias_l, weight_w, bias_w)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    heads, weight_l, bias_l, weight_w, bias_w = ctx.saved_tensors
    parameters = (weight_l, weight_w, bias_w)
    d_qkv, d_weight_l, d_weight_w, d_bias_w = talking_heads_backward(
        d_out.contiguous(), heads, *parameters, ctx.scale
    )
    return d_qkv, d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w, None


talking_heads.register_autograd(_gradients, setup_context=_save)

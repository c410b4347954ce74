"""Mix over heads, softmax, mix over heads: one Triton kernel forward and one backward, in place.

Shapes: B images, N tokens, h heads (f, g and h number them). Maps are [B·h, N, columns], where columns
is N rounded up to a multiple of 16 and maps are 0 beyond N. With W_l and W_w [h, h],

    L_g = Σ_h W_l[g,h] S_h     P_g = softmax(L_g)     A_f = Σ_g W_w[f,g] P_g

    dP_g = Σ_f W_w[f,g] dA_f     dL_g = P_g ∘ (dP_g - D_g)     D_g = Σ_m P_g ∘ dP_g
    dS_h = Σ_g W_l[g,h] dL_g     dW_l[g,h] = Σ dL_g ∘ S_h      dW_w[f,g] = Σ dA_f ∘ P_g

A tile has R = 16 rows: as many queries as fit, each in all of its heads. Mixing is then a product with a
block-diagonal 16×16 matrix on the tensor cores. Tiles are held transposed, [C, R] for C columns, so the
warps can divide the columns. In half precision W is the sum of a high and a low part, which keeps 16 bits or
more; float32 takes three products of tf32. There are no atomics, so every sum has one order.
"""

# mypy: ignore-errors
# Triton's language looks like Python, and is not.

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
PRECISION = tl.constexpr("tf32x3")  # of products of float32


@triton.jit
def _spread(
    weight,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    dtype: tl.constexpr,
):
    """High and low part of the matrix [R, R] that mixes each query of a tile over its heads."""
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    keep = (i // H == j // H) & (j < R // H * H)
    exact = tl.load(weight + j % H * TO + i % H * FROM, mask=keep, other=0.0)
    high = exact.to(dtype)
    return high, (exact - high.to(tl.float32)).to(dtype)


@triton.jit
def _mix(tile, mixer):
    """[columns, R] mixed over the heads, in float32."""
    mixed = tl.dot(tile, mixer[0], input_precision=PRECISION)
    if tile.dtype != tl.float32:
        mixed = tl.dot(tile, mixer[1], mixed)
    return mixed


@triton.jit
def _places(tile, queries, N, ld, H: tl.constexpr, R: tl.constexpr):
    """Offsets of the rows of a tile, and which of them exist. Queries are numbered through all images."""
    row = tl.arange(0, R)
    query = tile * (R // H) + row // H
    image, head = query // N, row % H
    begin = ((image.to(tl.int64) * H + head) * N + query % N) * ld
    return begin[None, :], ((row < R // H * H) & (query < queries))[None, :]


@triton.jit
def _chunk(start, ld, place, exists, C: tl.constexpr):
    """Offsets [C, R] of C columns, and which of them exist."""
    columns = (start + tl.arange(0, C))[:, None]
    return place + columns, exists & (columns < ld)


@triton.jit
def _logits(S, mix_l, start, N, C: tl.constexpr):
    """L, and -inf beyond the last column."""
    return tl.where((start + tl.arange(0, C) < N)[:, None], _mix(S, mix_l), float("-inf"))


@triton.jit
def _powers(L, top):
    """exp(L - top), where top is one number a row: one multiply-add and one power of 2."""
    return tl.exp2(L * LOG2_E - (top * LOG2_E)[None, :])


@triton.jit
def _outer(a, b, sums, C: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr):
    """Add aᵀ b to sums [WARPS, R, R], for tiles [C, R]; each warp sums its share of the columns."""
    a = tl.permute(tl.reshape(a, [WARPS, C // WARPS, R]), [0, 2, 1])
    return tl.dot(a, tl.reshape(b, [WARPS, C // WARPS, R]), sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=["queries", "N", "turns"])
def forward_kernel(
    maps, weight_l, weight_w, queries, N, ld, turns, H: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Turn S into A, one tile a turn. A tile that holds all columns (ONCE) is read once, others twice."""
    dtype: tl.constexpr = maps.dtype.element_ty
    mix_l, mix_w = _spread(weight_l, H, 1, H, R, dtype), _spread(weight_w, H, 1, H, R, dtype)
    for turn in range(turns):
        place, exists = _places(tl.program_id(0) * turns + turn, queries, N, ld, H, R)
        if ONCE:
            at, keep = _chunk(0, ld, place, exists, C)
            x = _logits(tl.load(maps + at, mask=keep, other=0.0), mix_l, 0, N, C)
            powers = _powers(x, tl.max(x, 0))
            P = powers * (1 / tl.sum(powers, 0))[None, :]
            tl.store(maps + at, _mix(P.to(dtype), mix_w).to(dtype), mask=keep)
        else:
            top, total = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
            for start in range(0, N, C):
                at, keep = _chunk(start, ld, place, exists, C)
                x = _logits(tl.load(maps + at, mask=keep, other=0.0), mix_l, start, N, C)
                higher = tl.maximum(top, tl.max(x, 0))
                total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(_powers(x, higher), 0)
                top = higher
            total = 1 / total
            for start in range(0, N, C):
                at, keep = _chunk(start, ld, place, exists, C)
                x = _logits(tl.load(maps + at, mask=keep, other=0.0), mix_l, start, N, C)
                P = _powers(x, top) * total[None, :]
                tl.store(maps + at, _mix(P.to(dtype), mix_w).to(dtype), mask=keep)


@triton.jit(do_not_specialize=["queries", "N", "turns"])
def backward_kernel(
    maps, d_maps, weight_l, weight_w, sums, queries, N, ld, turns, H: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ONCE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Turn S into dS and dA into A, one tile a turn; store the program's share of dW_l and dW_w, [2, R, R]."""
    dtype: tl.constexpr = maps.dtype.element_ty
    mix_l, mix_w = _spread(weight_l, H, 1, H, R, dtype), _spread(weight_w, H, 1, H, R, dtype)
    unmix_l, unmix_w = _spread(weight_l, 1, H, H, R, dtype), _spread(weight_w, 1, H, H, R, dtype)
    d_weight_l = tl.zeros([WARPS, R, R], tl.float32)
    d_weight_w = tl.zeros([WARPS, R, R], tl.float32)
    for turn in range(turns):
        place, exists = _places(tl.program_id(0) * turns + turn, queries, N, ld, H, R)
        if ONCE:
            at, keep = _chunk(0, ld, place, exists, C)
            S = tl.load(maps + at, mask=keep, other=0.0)
            dA = tl.load(d_maps + at, mask=keep, other=0.0)
            x = _logits(S, mix_l, 0, N, C)
            powers = _powers(x, tl.max(x, 0))
            P = powers * (1 / tl.sum(powers, 0))[None, :]
            dP = _mix(dA, unmix_w)
            dL = P * (dP - tl.sum(P * dP, 0)[None, :])
            P, dL = P.to(dtype), dL.to(dtype)
            tl.store(d_maps + at, _mix(P, mix_w).to(dtype), mask=keep)
            tl.store(maps + at, _mix(dL, unmix_l).to(dtype), mask=keep)
            d_weight_w = _outer(dA, P, d_weight_w, C, R, WARPS)
            d_weight_l = _outer(dL, S, d_weight_l, C, R, WARPS)
        else:
            top, total = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
            mean = tl.zeros([R], tl.float32)
            for start in range(0, N, C):
                at, keep = _chunk(start, ld, place, exists, C)
                x = _logits(tl.load(maps + at, mask=keep, other=0.0), mix_l, start, N, C)
                dP = _mix(tl.load(d_maps + at, mask=keep, other=0.0), unmix_w)
                higher = tl.maximum(top, tl.max(x, 0))
                powers, fade = _powers(x, higher), tl.exp2((top - higher) * LOG2_E)
                total = total * fade + tl.sum(powers, 0)
                mean = mean * fade + tl.sum(powers * dP, 0)
                top = higher
            total = 1 / total
            mean *= total
            for start in range(0, N, C):
                at, keep = _chunk(start, ld, place, exists, C)
                S = tl.load(maps + at, mask=keep, other=0.0)
                dA = tl.load(d_maps + at, mask=keep, other=0.0)
                P = _powers(_logits(S, mix_l, start, N, C), top) * total[None, :]
                dL = P * (_mix(dA, unmix_w) - mean[None, :])
                P, dL = P.to(dtype), dL.to(dtype)
                tl.store(d_maps + at, _mix(P, mix_w).to(dtype), mask=keep)
                tl.store(maps + at, _mix(dL, unmix_l).to(dtype), mask=keep)
                d_weight_w = _outer(dA, P, d_weight_w, C, R, WARPS)
                d_weight_l = _outer(dL, S, d_weight_l, C, R, WARPS)
    at = (
        sums
        + tl.program_id(0) * 2 * R * R
        + tl.arange(0, R)[:, None] * R
        + tl.arange(0, R)[None, :]
    )
    tl.store(at, tl.sum(d_weight_l, 0))
    tl.store(at + R * R, tl.sum(d_weight_w, 0))

# mypy: disable-error-code="no-untyped-def"
"""Talking-heads attention as Triton kernels: no map of N×N touches memory, forward or backward.

Shapes: B images, N tokens, h heads (f, g and h number them), k channels a head. For one image, with
W_l and W_w [h, h] before and after the softmax,

    S_h = Q_h K_hᵀ     L_g = scale · Σ_h W_l[g,h] S_h     P_g = softmax(L_g)     A_f = Σ_g W_w[f,g] P_g
    O_f = A_f V_f + b_w[f] Σ_n V_f

    dA_f = dO_f V_fᵀ     dP_g = Σ_f W_w[f,g] dA_f     dL_g = P_g ∘ (dP_g - D_g)     D_g = Σ_n P_g ∘ dP_g
    dS_h = scale · Σ_g W_l[g,h] dL_g     dQ_h = dS_h K_h     dK_h = dS_hᵀ Q_h
    dV_f = A_fᵀ dO_f + b_w[f] Σ_m dO_f     dW_l[g,h] = scale · Σ dL_g ∘ S_h     dW_w[f,g] = Σ dA_f ∘ P_g

b_l is the same for a whole row, so the softmax cancels it. A program holds one tile of the scores for
all heads in registers, as a tuple of h tensors, and mixes them there in float32; the products on
either side are the tensor cores'. Kept are the rows' softmax statistics and D, [B, h, N] each. Every
sum has one order, so two runs give the same bits. docs/kernel.md has the reckoning.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _pointers(base, tokens, stride, BK: tl.constexpr):
    """To head 0 of the tokens, [tokens, BK]; those of head h are the constant h·k further."""
    return base + tokens[:, None] * stride + tl.arange(0, BK)[None, :]


@triton.jit
def _keep(tokens, N, K: tl.constexpr, BK: tl.constexpr):
    return (tokens < N)[:, None] & (tl.arange(0, BK) < K)[None, :]


@triton.jit
def _zeros(COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles += (tl.zeros([M, N], tl.float32),)
    return tiles


@triton.jit
def _product(a, b, keep_a, keep_b, head):
    """a bᵀ of one head, [rows of a, rows of b]."""
    a = tl.load(a + head, mask=keep_a, other=0.0)
    b = tl.load(b + head, mask=keep_b, other=0.0)
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _mixed_products(
    a, b, keep_a, keep_b, weight, COUNT: tl.constexpr, TO: tl.constexpr, FROM: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Σ_h weight[g·TO + h·FROM] a_h b_hᵀ for COUNT heads g, [M, N] each; of the products one is alive at a time."""
    mixed = _zeros(COUNT, M, N)
    for h in tl.static_range(H):
        product = _product(a, b, keep_a, keep_b, h * K)
        more = ()
        for g in tl.static_range(COUNT):
            more += (tl.fma(product, tl.load(weight + g * TO + h * FROM), mixed[g]),)
        mixed = more
    return mixed


@triton.jit
def _mix(tiles, weight, STEP: tl.constexpr, H: tl.constexpr):
    """Σ_g weight[g·STEP] tile_g."""
    mixed = tiles[0] * tl.load(weight)
    for g in tl.static_range(1, H):
        mixed = tl.fma(tiles[g], tl.load(weight + g * STEP), mixed)
    return mixed


@triton.jit
def _fold_columns(x, MAX: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPREAD: tl.constexpr):
    """Reduce [M, N] to [M, 4·SPREAD] over the columns that one thread holds: no thread waits for another."""
    x = tl.reshape(x, [M, N // (8 * SPREAD), 4 * SPREAD, 2])
    return tl.max(tl.max(x, 3), 1) if MAX else tl.sum(tl.sum(x, 3), 1)


@triton.jit
def _fold(x, M: tl.constexpr, N: tl.constexpr, SPREAD: tl.constexpr, WARPS: tl.constexpr):
    """Sum [M, N] over the places that one thread holds: a number a thread, [WARPS // SPREAD · 8, 4·SPREAD]."""
    x = _fold_columns(x, False, M, N, SPREAD)
    DOWN: tl.constexpr = WARPS // SPREAD
    x = tl.reshape(x, [M // (16 * DOWN), DOWN, 2, 8, 4 * SPREAD])
    return tl.reshape(tl.sum(tl.sum(x, 2), 0), [DOWN * 8, 4 * SPREAD])


@triton.jit
def _forward_kernel(
    qkv, weight_l, weight_w, shift, out, lse, N, stride_b, stride_n, zero, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """O for M queries of one image, in two passes over the keys: the rows' statistics first.

    weight_l is multiplied by scale·log₂e: exponentials are powers of 2, and so is the lse [B, h, N].
    """
    SPREAD: tl.constexpr = 1 if M >= BN else WARPS
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    qkv += image * stride_b
    q, keep_q = _pointers(qkv, rows, stride_n, BK), _keep(rows, N, K, BK)
    top, total = (), ()
    for _ in tl.static_range(H):
        top += (tl.full([M, 4 * SPREAD], -1e38, tl.float32),)  # finite: a thread may see no key at all
        total += (tl.zeros([M, 4 * SPREAD], tl.float32),)
    for start in range(0, N, BN):
        columns = start + tl.arange(0, BN)
        k, keep_k = _pointers(qkv + H * K, columns, stride_n, BK), _keep(columns, N, K, BK)
        L = _mixed_products(q, k, keep_q, keep_k, weight_l + start * zero, H, H, 1, H, K, M, BN)
        higher, more = (), ()
        for g in tl.static_range(H):
            x = tl.where((columns < N)[None, :], L[g], float("-inf"))
            t = tl.maximum(top[g], _fold_columns(x, True, M, BN, SPREAD))
            wide = tl.broadcast_to(t[:, None, :, None], [M, BN // (8 * SPREAD), 4 * SPREAD, 2])
            powers = tl.exp2(x - tl.reshape(wide, [M, BN]))
            more += (total[g] * tl.exp2(top[g] - t) + _fold_columns(powers, False, M, BN, SPREAD),)
            higher += (t,)
        top, total = higher, more
    stats = ()
    for g in tl.static_range(H):
        t = tl.max(top[g], 1)
        stats += (t + tl.log2(tl.sum(total[g] * tl.exp2(top[g] - t[:, None]), 1)),)
        tl.store(lse + (image * H + g) * N + rows, stats[g], mask=rows < N)
    acc = _zeros(H, M, BK)
    for start in range(0, N, BN):
        columns = start + tl.arange(0, BN)
        k, keep_k = _pointers(qkv + H * K, columns, stride_n, BK), _keep(columns, N, K, BK)
        L = _mixed_products(q, k, keep_q, keep_k, weight_l + start * zero, H, H, 1, H, K, M, BN)
        P = ()
        for g in tl.static_range(H):
            P += (tl.where((columns < N)[None, :], tl.exp2(L[g] - stats[g][:, None]), 0.0),)
        more = ()
        for f in tl.static_range(H):
            v = tl.load(k + (H + f) * K, mask=keep_k, other=0.0)
            A = _mix(P, weight_w + f * H + start * zero, 1, H)
            more += (tl.dot(A.to(v.dtype), v, acc[f], input_precision="ieee"),)
        acc = more
    channels = tl.arange(0, BK)
    out = _pointers(out + image * N * H * K, rows, H * K, BK)
    for f in tl.static_range(H):
        added = tl.load(shift + (image * H + f) * K + channels, mask=channels < K, other=0.0)
        tl.store(out + f * K, (acc[f] + added[None, :]).to(out.dtype.element_ty), mask=keep_q)


@triton.jit
def _store_sums(at, parts, COUNT: tl.constexpr, LEVELS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Store the sum of each of COUNT <= 2**LEVELS tensors [M, N], stacked so that one reduction serves them all."""
    for _ in tl.static_range(COUNT, 2**LEVELS):
        parts += (tl.zeros([M, N], tl.float32),)
    for level in tl.static_range(1, LEVELS + 1):
        pairs = ()
        for i in tl.static_range(2 ** (LEVELS - level)):
            pairs += (tl.join(parts[i], parts[i + 2 ** (LEVELS - level)]),)
        parts = pairs
    sums = tl.sum(tl.reshape(parts[0], [M * N, 2**LEVELS]), 0)
    i = tl.arange(0, 2**LEVELS)
    tl.store(at + i, sums, mask=i < COUNT)


@triton.jit
def _probabilities(
    q, k, keep_q, keep_k, keys, lse, rows, N, weight_l, COUNT: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """P_g of COUNT heads, queries × keys, 0 beyond the last key."""
    L = _mixed_products(q, k, keep_q, keep_k, weight_l, COUNT, H, 1, H, K, M, BN)
    P = ()
    for g in tl.static_range(COUNT):
        stats = tl.load(lse + g * N + rows, mask=rows < N, other=0.0)
        P += (tl.where((keys < N)[None, :], tl.exp2(L[g] - stats[:, None]), 0.0),)
    return P


@triton.jit
def _weights_kernel(
    qkv, d_out, lse, weight_l, weight_w, D, d_weight_l, d_weight_w, N, stride_b, stride_n, zero, H: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """For M queries of one image and G of the heads g: D, then the shares of dW_w[:, g] and dW_l[g]."""
    SPREAD: tl.constexpr = 1 if M >= BN else WARPS
    DOWN: tl.constexpr = WARPS // SPREAD
    block, image, first = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * G
    rows = block * M + tl.arange(0, M)
    qkv += image * stride_b
    lse += (image * H + first) * N
    D += (image * H + first) * N
    share = ((image * tl.num_programs(0) + block) * H + first) * H  # [B, blocks, g, h or f]
    q, keep_q = _pointers(qkv, rows, stride_n, BK), _keep(rows, N, K, BK)
    dO = _pointers(d_out + image * N * H * K, rows, H * K, BK)
    weight_l += first * H
    weight_w += first
    sums = _zeros(G, M, 4 * SPREAD)
    parts = _zeros(G * H, 8 * DOWN, 4 * SPREAD)
    for start in range(0, N, BN):
        turn = start * zero
        keys = start + tl.arange(0, BN)
        k, keep_k = _pointers(qkv + H * K, keys, stride_n, BK), _keep(keys, N, K, BK)
        P = _probabilities(q, k, keep_q, keep_k, keys, lse + turn, rows, N, weight_l + turn, G, H, K, M, BN)
        dP = _zeros(G, M, BN)
        added = ()
        for f in tl.static_range(H):
            dA = _product(dO, k + H * K, keep_q, keep_k, f * K)
            more = ()
            for g in tl.static_range(G):
                more += (tl.fma(dA, tl.load(weight_w + f * H + g + turn), dP[g]),)
                added += (parts[f * G + g] + _fold(P[g] * dA, M, BN, SPREAD, WARPS),)
            dP = more
        parts = added
        added = ()
        for g in tl.static_range(G):
            added += (sums[g] + _fold_columns(P[g] * dP[g], False, M, BN, SPREAD),)
        sums = added
    transposed = ()
    for g in tl.static_range(G):
        for f in tl.static_range(H):
            transposed += (parts[f * G + g],)
    _store_sums(d_weight_w + share, transposed, G * H, LEVELS, 8 * DOWN, 4 * SPREAD)
    means = ()
    for g in tl.static_range(G):
        means += (tl.sum(sums[g], 1),)
        tl.store(D + g * N + rows, means[g], mask=rows < N)
    parts = _zeros(G * H, 8 * DOWN, 4 * SPREAD)
    for start in range(0, N, BN):
        turn = start * zero
        keys = start + tl.arange(0, BN)
        k, keep_k = _pointers(qkv + H * K, keys, stride_n, BK), _keep(keys, N, K, BK)
        P = _probabilities(q, k, keep_q, keep_k, keys, lse + turn, rows, N, weight_l + turn, G, H, K, M, BN)
        dP = _mixed_products(dO, k + H * K, keep_q, keep_k, weight_w + turn, G, 1, H, H, K, M, BN)
        dL = ()
        for g in tl.static_range(G):
            dL += (P[g] * (dP[g] - means[g][:, None]),)
        added = ()
        for h in tl.static_range(H):
            S = _product(q, k + turn, keep_q, keep_k, h * K)  # computed again, for h more tiles would not fit
            for g in tl.static_range(G):
                added += (parts[h * G + g] + _fold(dL[g] * S, M, BN, SPREAD, WARPS),)
        parts = added
    transposed = ()
    for g in tl.static_range(G):
        for h in tl.static_range(H):
            transposed += (parts[h * G + g],)
    _store_sums(d_weight_l + share, transposed, G * H, LEVELS, 8 * DOWN, 4 * SPREAD)


@triton.jit
def _queries_kernel(
    qkv, d_out, lse, D, weight_l, weight_w, d_qkv, N, stride_b, stride_n, zero, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ for M queries of one image."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    qkv += image * stride_b
    lse += image * H * N
    D += image * H * N
    q, keep_q = _pointers(qkv, rows, stride_n, BK), _keep(rows, N, K, BK)
    dO = _pointers(d_out + image * N * H * K, rows, H * K, BK)
    acc = _zeros(H, M, BK)
    for start in range(0, N, BN):
        turn = start * zero
        keys = start + tl.arange(0, BN)
        k, keep_k = _pointers(qkv + H * K, keys, stride_n, BK), _keep(keys, N, K, BK)
        P = _probabilities(q, k, keep_q, keep_k, keys, lse + turn, rows, N, weight_l + turn, H, H, K, M, BN)
        dP = _mixed_products(dO, k + H * K, keep_q, keep_k, weight_w + turn, H, 1, H, H, K, M, BN)
        dL = ()
        for g in tl.static_range(H):
            mean = tl.load(D + g * N + rows + turn, mask=rows < N, other=0.0)
            dL += (P[g] * (dP[g] - mean[:, None]),)
        more = ()
        for h in tl.static_range(H):
            dS = _mix(dL, weight_l + h + turn, H, H)
            keys_h = tl.load(k + h * K, mask=keep_k, other=0.0)
            more += (tl.dot(dS.to(keys_h.dtype), keys_h, acc[h], input_precision="ieee"),)
        acc = more
    dQ = _pointers(d_qkv + image * N * 3 * H * K, rows, 3 * H * K, BK)
    for h in tl.static_range(H):  # weight_l came with a factor of log₂e
        tl.store(dQ + h * K, (acc[h] * LN_2).to(d_qkv.dtype.element_ty), mask=keep_q)


@triton.jit
def _keys_kernel(
    qkv, d_out, lse, D, weight_l, weight_w, shift, d_qkv, N, stride_b, stride_n, zero, H: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV for M keys of one image. Tiles are keys × queries, so that no product needs one transposed."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    qkv += image * stride_b
    d_out += image * N * H * K
    lse += image * H * N
    D += image * H * N
    k, keep_k = _pointers(qkv + H * K, rows, stride_n, BK), _keep(rows, N, K, BK)
    dK, dV = _zeros(H, M, BK), _zeros(H, M, BK)
    for start in range(0, N, BN):
        turn = start * zero
        queries = start + tl.arange(0, BN)
        keep = queries < N
        q, keep_q = _pointers(qkv, queries, stride_n, BK), _keep(queries, N, K, BK)
        dO = _pointers(d_out, queries, H * K, BK)
        L = _mixed_products(k, q, keep_k, keep_q, weight_l + turn, H, H, 1, H, K, M, BN)
        P = ()
        for g in tl.static_range(H):  # no key beyond the last needs a 0: its gradients are not stored
            P += (tl.exp2(L[g] - tl.load(lse + g * N + queries + turn, mask=keep, other=float("inf"))[None, :]),)
        more = ()
        for f in tl.static_range(H):
            A = _mix(P, weight_w + f * H + turn, 1, H)
            dO_f = tl.load(dO + f * K, mask=keep_q, other=0.0)
            more += (tl.dot(A.to(dO_f.dtype), dO_f, dV[f], input_precision="ieee"),)
        dV = more
        dP = _mixed_products(k + H * K, dO, keep_k, keep_q, weight_w + turn, H, 1, H, H, K, M, BN)
        dL = ()
        for g in tl.static_range(H):
            dL += (P[g] * (dP[g] - tl.load(D + g * N + queries + turn, mask=keep, other=0.0)[None, :]),)
        more = ()
        for h in tl.static_range(H):
            dS = _mix(dL, weight_l + h + turn, H, H)
            q_h = tl.load(q + h * K, mask=keep_q, other=0.0)
            more += (tl.dot(dS.to(q_h.dtype), q_h, dK[h], input_precision="ieee"),)
        dK = more
    channels = tl.arange(0, BK)
    d_keys = _pointers(d_qkv + (image * N * 3 + 1) * H * K, rows, 3 * H * K, BK)
    for h in tl.static_range(H):
        added = tl.load(shift + (image * H + h) * K + channels, mask=channels < K, other=0.0)
        tl.store(d_keys + h * K, (dK[h] * LN_2).to(d_qkv.dtype.element_ty), mask=keep_k)
        tl.store(d_keys + (H + h) * K, (dV[h] + added[None, :]).to(d_qkv.dtype.element_ty), mask=keep_k)


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


TILINGS: dict[tuple[tuple[int, int], torch.dtype, int, int, int], Tiling] = {}
"""Measured to be best, by compute capability, type, h, k and N. Empty: nothing has been measured yet.

Another tiling is another order of summation, so the choice must not change between two runs: it is
looked up here and never timed at run time. `benchmarks/kernel.py` times the candidates and prints rows.
"""


def candidates(heads: int, dtype: torch.dtype) -> list[Tiling]:
    """A short list to choose from, the default first. They compile for compute capability 8.0 to 9.0."""
    small, large = Tile(16, 64, 4, 1), Tile(16, 64, 8, 1)
    return [Tiling(small, small, small, large)]


def tiling(qkv: Tensor) -> Tiling:
    _, N, _, h, k = qkv.shape
    if not qkv.is_cuda:  # the interpreter: the fewer programs the better
        return Tiling(*[Tile(64, 128, 4, 1)] * 4)
    key = (torch.cuda.get_device_capability(qkv.device), qkv.dtype, h, k, N)
    return TILINGS.get(key) or candidates(h, qkv.dtype)[0]


def _prepared(qkv: Tensor) -> Tensor:
    """Heads and channels side by side, as the linear layer leaves them; images and tokens may be anywhere."""
    h, k = qkv.shape[3:]
    return qkv if qkv.stride()[2:] == (h * k, k, 1) else qkv.contiguous()


def _launch(kernel, tile: Tile, qkv: Tensor, *arguments: Tensor, parts: int = 1, **constants: int) -> None:
    B, N, _, h, k = qkv.shape
    constants |= dict(H=h, K=k, BK=max(16, triton.next_power_of_2(k)), M=tile.rows, BN=tile.columns)
    with torch.cuda.device_of(qkv):
        kernel[triton.cdiv(N, tile.rows), B, parts](
            qkv, *arguments, N, qkv.stride(0), qkv.stride(1), 0, **constants, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip


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
    B, N, _, h, k = qkv.shape
    out, lse = _outputs(qkv)
    shift = bias_w.float()[:, None] * _token_sums(qkv[:, :, 2])
    tile = tiling(qkv).forward
    mixers = _mixers(weight_l, weight_w, scale)
    _launch(_forward_kernel, tile, qkv, *mixers, shift, out, lse, WARPS=tile.warps)
    return out, lse


@talking_heads.register_fake
def _(qkv, weight_l, bias_l, weight_w, bias_w, scale):
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
    qkv, d_out = _prepared(qkv), d_out.contiguous()
    B, N, _, h, k = qkv.shape
    forward, weights, queries, keys = tiling(qkv)
    mixers = _mixers(weight_l, weight_w, scale)
    D, d_qkv = torch.empty_like(lse), qkv.new_empty(qkv.shape)
    group = max(g for g in range(1, 5) if h % g == 0)
    shares = lse.new_empty(2, B, triton.cdiv(N, weights.rows), h, h)  # of dW_l[g,h] and of dW_w[f,g] as [g,f]
    _launch(
        _weights_kernel, weights, qkv, d_out, lse, *mixers, D, *shares, parts=h // group, G=group,
        LEVELS=(group * h - 1).bit_length(), WARPS=weights.warps,
    )  # fmt: skip
    _launch(_queries_kernel, queries, qkv, d_out, lse, D, *mixers, d_qkv)
    sum_v, sum_dO = _token_sums(qkv[:, :, 2]), _token_sums(d_out.view(B, N, h, k))
    shift = bias_w.float()[:, None] * sum_dO
    _launch(_keys_kernel, keys, qkv, d_out, lse, D, *mixers, shift, d_qkv)
    d_weight_l, d_weight_w = shares.sum(dim=(1, 2))
    d_bias_w = (sum_v * sum_dO).sum(dim=(0, 2))
    gradients = (d_weight_l * scale, d_weight_w.T.contiguous(), d_bias_w)
    parameters = (weight_l, weight_w, bias_w)
    return d_qkv, *(grad.to(of.dtype) for grad, of in zip(gradients, parameters, strict=True))


@talking_heads_backward.register_fake
def _(d_out, qkv, lse, weight_l, weight_w, bias_w, scale):
    return qkv.new_empty(qkv.shape), *(torch.empty_like(of) for of in (weight_l, weight_w, bias_w))


def _save(ctx, inputs, output) -> None:
    qkv, weight_l, bias_l, weight_w, bias_w, ctx.scale = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(qkv, lse, weight_l, bias_l, weight_w, bias_w)


def _gradients(ctx, d_out, _):
    qkv, lse, weight_l, bias_l, weight_w, bias_w = ctx.saved_tensors
    d_qkv, d_weight_l, d_weight_w, d_bias_w = talking_heads_backward(
        d_out, qkv, lse, weight_l, weight_w, bias_w, ctx.scale
    )
    return d_qkv, d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w, None


talking_heads.register_autograd(_gradients, setup_context=_save)

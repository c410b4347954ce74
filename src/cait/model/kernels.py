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

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))
PRECISION = tl.constexpr("tf32x3")  # of products of float32: about as exact, and on the tensor cores


@triton.jit
def _pointers(base, tokens, stride, BK: tl.constexpr):
    """To head 0 of the tokens, [tokens, BK]; those of head h are the constant h·k further."""
    return base + tokens[:, None] * stride + tl.arange(0, BK)[None, :]


@triton.jit
def _place(N, M: tl.constexpr):
    """Which block of M tokens of which image. One axis of the grid for both: the others end at 65535."""
    blocks = tl.cdiv(N, M)
    return tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)  # B·N·3·h·k may pass 2³¹


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
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


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
def forward_kernel(
    qkv, weight_l, weight_w, shift, out, lse, N, stride_b, stride_n, zero, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """O for M queries of one image, in two passes over the keys: the rows' statistics first.

    weight_l is multiplied by scale·log₂e: exponentials are powers of 2, and so is the lse [B, h, N].
    """
    SPREAD: tl.constexpr = 1 if M >= BN else WARPS
    block, image = _place(N, M)
    rows = block * M + tl.arange(0, M)
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
            more += (tl.dot(A.to(v.dtype), v, acc[f], input_precision=PRECISION),)
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
def weights_kernel(
    qkv, d_out, lse, weight_l, weight_w, D, d_weight_l, d_weight_w, N, stride_b, stride_n, zero, H: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """For M queries of one image and G of the heads g: D, then the shares of dW_w[:, g] and dW_l[g]."""
    SPREAD: tl.constexpr = 1 if M >= BN else WARPS
    DOWN: tl.constexpr = WARPS // SPREAD
    block, image = _place(N, M)
    first = tl.program_id(1) * G
    rows = block * M + tl.arange(0, M)
    qkv += image * stride_b
    lse += (image * H + first) * N
    D += (image * H + first) * N
    share = ((image * tl.cdiv(N, M) + block) * H + first) * H  # [B, blocks, groups of G, h or f, g]
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
    _store_sums(d_weight_w + share, parts, G * H, LEVELS, 8 * DOWN, 4 * SPREAD)
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
            S = _product(q, k, keep_q, keep_k, h * K)
            for g in tl.static_range(G):
                added += (parts[h * G + g] + _fold(dL[g] * S, M, BN, SPREAD, WARPS),)
        parts = added
    _store_sums(d_weight_l + share, parts, G * H, LEVELS, 8 * DOWN, 4 * SPREAD)


@triton.jit
def queries_kernel(
    qkv, d_out, lse, D, weight_l, weight_w, d_qkv, N, stride_b, stride_n, zero, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ for M queries of one image."""
    block, image = _place(N, M)
    rows = block * M + tl.arange(0, M)
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
            more += (tl.dot(dS.to(keys_h.dtype), keys_h, acc[h], input_precision=PRECISION),)
        acc = more
    dQ = _pointers(d_qkv + image * N * 3 * H * K, rows, 3 * H * K, BK)
    for h in tl.static_range(H):  # weight_l came with a factor of log₂e
        tl.store(dQ + h * K, (acc[h] * LN_2).to(d_qkv.dtype.element_ty), mask=keep_q)


@triton.jit
def keys_kernel(
    qkv, d_out, lse, D, weight_l, weight_w, shift, d_qkv, N, stride_b, stride_n, zero, H: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV for M keys of one image. Tiles are keys × queries, so that no product needs one transposed."""
    block, image = _place(N, M)
    rows = block * M + tl.arange(0, M)
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
            more += (tl.dot(A.to(dO_f.dtype), dO_f, dV[f], input_precision=PRECISION),)
        dV = more
        dP = _mixed_products(k + H * K, dO, keep_k, keep_q, weight_w + turn, H, 1, H, H, K, M, BN)
        dL = ()
        for g in tl.static_range(H):
            dL += (P[g] * (dP[g] - tl.load(D + g * N + queries + turn, mask=keep, other=0.0)[None, :]),)
        more = ()
        for h in tl.static_range(H):
            dS = _mix(dL, weight_l + h + turn, H, H)
            q_h = tl.load(q + h * K, mask=keep_q, other=0.0)
            more += (tl.dot(dS.to(q_h.dtype), q_h, dK[h], input_precision=PRECISION),)
        dK = more
    channels = tl.arange(0, BK)
    d_keys = _pointers(d_qkv + (image * N * 3 + 1) * H * K, rows, 3 * H * K, BK)
    for h in tl.static_range(H):
        added = tl.load(shift + (image * H + h) * K + channels, mask=channels < K, other=0.0)
        tl.store(d_keys + h * K, (dK[h] * LN_2).to(d_qkv.dtype.element_ty), mask=keep_k)
        tl.store(d_keys + (H + h) * K, (dV[h] + added[None, :]).to(d_qkv.dtype.element_ty), mask=keep_k)

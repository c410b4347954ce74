"""The two attentions of CaiT.

Shapes: B images, N patches, h heads (g after mixing), d = embed_dim, k = d / h.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cait.errors import UserError
from cait.model.config import CaiTConfig
from cait.model.residual import scalar_bias, scaled_linear

COSINE_EPS = 1e-6

FASTEST: dict[tuple[int, int], Literal["fused", "recompute"]] = {}
"""The backend that was measured to be fastest, by compute capability. Empty: nothing has been measured yet.

Where it says nothing, "auto" takes "fused" on a GPU: it moves half the bytes. `benchmarks/kernel.py` measures.
"""

CHECKED: dict[tuple[torch.device, torch.dtype, int, int, int], bool] = {}
"""What the check of "fused" found in this process, by device, type, N, h and k."""


def mix_heads(maps_BhNN: Tensor, weight_hh: Tensor, bias_h: Tensor) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    Written as one matrix product over [B, h, N·N], so that the maps are not permuted (and copied)
    to bring the heads last, as nn.Linear would have it.
    """
    batch, heads = maps_BhNN.shape[:2]
    mixed = torch.baddbmm(bias_h[:, None], weight_hh.expand(batch, heads, heads), maps_BhNN.flatten(2))
    return mixed.view_as(maps_BhNN)


class TalkingHeads(torch.autograd.Function):
    """Talking-heads attention that keeps one of its four N×N maps for the backward pass and recomputes the others.

    With S = scale · Q Kᵀ, L = W_l S, P = softmax(L), A = W_w P and O = A V + b_w Σ_m V, products over the
    heads where W stands, the backward pass is

        dA = dO Vᵀ     dP = W_wᵀ dA     dL = P ∘ (dP - Σ_m P ∘ dP)     dS = W_lᵀ dL

    and dV, dQ, dK, dW_l, dW_w as usual. The products take the scale before they round, at no cost, so
    float16 holds S where it would not hold Q Kᵀ. S and A are one product each, so P alone is kept. b_l is
    the same for a whole row, so the softmax cancels it and its gradient is 0; b_w reaches the output
    through the sum of V and never touches a map. The maps are in the precision of Q, K and V, with the
    softmax's sums in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]."""
        B, N, _, h, _ = qkv.shape
        with no_autocast(qkv):
            mix_l, mix_w = _mixers(B, qkv.dtype, weight_l, weight_w)
            heads = heads_first(qkv, _columns(qkv))  # kept in place of qkv
            q, k, v = heads.unbind(0)
            L = _mix(mix_l, scaled_product(q[:, :N], k.transpose(1, 2), scale))
            if L.shape[2] > N:
                L[:, :, N:] = float("-inf")
            P = L.softmax(dim=-1)
            del L
            out = (_mix(mix_w, P) @ v).view(B, h, N, -1).transpose(1, 2).reshape(B, N, -1)
            out += _per_channel(bias_w, v) * _token_sum(v, B)
        ctx.save_for_backward(heads, weight_l, bias_l, weight_w, bias_w, P)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight_l, bias_l, weight_w, bias_w, P = ctx.saved_tensors
        (B, N, _), h = d_out.shape, len(bias_w)
        q, k, v = heads.unbind(0)
        q = q[:, :N]
        with no_autocast(heads):
            mix_l, mix_w = _mixers(B, heads.dtype, weight_l, weight_w)
            dO = d_out.view(B, N, h, -1).transpose(1, 2).reshape(B * h, N, -1)
            dV = _mix(mix_w, P).transpose(1, 2) @ dO
            dA = dO @ v.transpose(1, 2)
            dO_sum = _token_sum(dO, B)
            d_bias_w = _precise(dO_sum * _token_sum(v, B)).view(B, h, -1).sum(dim=(0, 2))
            d_weight_w = _outer(dA, P, h)
            dP = _mix(mix_w.transpose(1, 2), dA)
            del dA
            dL = torch.ops.aten._softmax_backward_data(dP, P, -1, P.dtype)
            del dP
            d_weight_l = _outer(dL, scaled_product(q, k.transpose(1, 2), ctx.scale), h)
            dS = _mix(mix_l.transpose(1, 2), dL)
            del dL
            dQ, dK = scaled_product(dS, k, ctx.scale), scaled_product(dS.transpose(1, 2), q, ctx.scale)
            d_qkv = torch.stack([d[:, :N].view(B, h, N, -1).transpose(1, 2) for d in (dQ, dK, dV)], dim=2)
            d_qkv[:, :, 2] += (_per_channel(bias_w, v) * dO_sum).view(B, 1, h, -1)
        gradients = (d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w)
        parameters = (weight_l, bias_l, weight_w, bias_w)
        return d_qkv, *(grad.to(of.dtype) for grad, of in zip(gradients, parameters, strict=True)), None


def no_autocast(x: Tensor) -> Any:
    """Autocast would have the softmax give out float32, twice the memory for a map that is rounded again."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _precise(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mixers(batch: int, dtype: torch.dtype, *weights_hh: Tensor) -> list[Tensor]:
    """The maps over heads in the precision of the scores, one for each image without a copy, [B, h, h]."""
    return [weight.to(dtype).expand(batch, -1, -1) for weight in weights_hh]


def _mix(mixer_Bhh: Tensor, maps: Tensor) -> Tensor:
    """Mix maps [B·h, N, columns] over the heads."""
    return torch.bmm(mixer_Bhh, maps.view(*mixer_Bhh.shape[:2], -1)).view_as(maps)


def padded(N: int) -> int:
    """Columns of a map in a GPU's memory: its rows then begin where cuBLAS and Triton read 16 bytes at a time."""
    return -(-N // 16) * 16


def _columns(qkv: Tensor) -> int:
    """Of "recompute"'s maps."""
    return padded(qkv.shape[1]) if qkv.is_cuda else qkv.shape[1]


def heads_first(qkv: Tensor, rows: int) -> Tensor:
    """[B, N, 3, h, k] to a contiguous [3, B·h, rows, k], 0 beyond N, so that maps are 0 there too."""
    B, N, _, h, k = qkv.shape
    heads = qkv.permute(2, 0, 3, 1, 4)
    if rows > N:
        heads = qkv.new_empty(3, B, h, rows, k)
        heads[:, :, :, N:] = 0
        heads[:, :, :, :N] = qkv.permute(2, 0, 3, 1, 4)
    return heads.reshape(3, B * h, rows, k).contiguous()


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a b for stacks of matrices, scaled before it is rounded."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def _outer(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Σ over images and places of a[g] b[h], for maps [B·h, N, N]: [h, h] in float32 or more."""
    products = a.view(-1, heads, a[0].numel()) @ b.view(-1, heads, b[0].numel()).transpose(1, 2)
    return _precise(products).sum(dim=0)


def _per_channel(bias_h: Tensor, heads: Tensor) -> Tensor:
    """A number a head for each of its channels, [h·k], for heads [B·h, N, k]."""
    return bias_h.to(heads.dtype).repeat_interleave(heads.shape[-1])


def _token_sum(heads: Tensor, batch: int) -> Tensor:
    """Heads [B·h, N, k] summed over the tokens: [B, 1, h·k]."""
    return heads.sum(dim=1).view(batch, 1, -1)


def talking_heads_attention(
    qkv: Tensor, proj_l: nn.Linear, proj_w: nn.Linear, scale: float, backend: str = "auto"
) -> Tensor:
    """Attention among all tokens whose maps are mixed over heads before (proj_l) and after (proj_w) the softmax.

    Args:
        qkv: queries, keys and values, [B, N, 3, h, k].
        backend: "reference" leaves the backward pass to autograd; "recompute" is `TalkingHeads`, the
            same values with a third of the memory; "fused" is `cait.model.fused`, which needs a GPU,
            moves half the bytes and keeps no map; "auto" takes the best for the device.

    Returns [B, N, h·k].

    Raises:
        UserError: "fused" is asked for where it cannot run.
    """
    if torch.compiler.is_exporting() or qkv.is_meta:  # no backward pass, and operators that every program knows
        backend = "reference"
    if backend == "auto":
        backend = "fused" if qkv.is_cuda and _fused_serves(qkv.device, qkv.dtype, *_sizes(qkv)) else "recompute"
    elif backend == "fused":
        _require_fused(qkv.device, qkv.dtype, qkv.shape[3])
    given = qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias, scale
    if backend == "fused":
        from cait.model import fused  # here, for Triton is not on every machine

        return fused.talking_heads(*given)[0]
    if backend == "recompute":
        return TalkingHeads.apply(*given)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
    return merge_heads(talking_maps(q, k, proj_l, proj_w, scale) @ v)


def _sizes(qkv: Tensor) -> tuple[int, int, int]:
    """N, h and k."""
    return qkv.shape[1], qkv.shape[3], qkv.shape[4]


@torch.compiler.assume_constant_result  # torch.compile need not follow a device's properties
def _require_fused(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    """
    Raises:
        UserError: "fused" cannot run.
    """
    try:
        from cait.model import fused
    except ImportError as error:
        raise UserError(f"attention_backend fused needs Triton ({error}); take auto or recompute") from error
    if reason := fused.refusal(device, dtype, heads):
        raise UserError(f"attention_backend fused needs {reason}; take auto or recompute")


@torch.compiler.assume_constant_result
def _fused_serves(device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> bool:
    """Whether "fused" is the best here, runs, and is right: it is checked once, and the outcome said."""
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
    """Compare "fused" with the plain backend on one random image: a second, most of it to compile the kernels."""
    from cait.model import fused

    bound = max(4 * torch.finfo(dtype).eps, 1e-4)
    try:
        found = fused.difference(device, dtype, N, heads, k)
    except Exception as error:  # a compiler that is not there, a driver that is too old: training goes on without
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


def talking_maps(
    q: Tensor, k: Tensor, proj_l: nn.Linear, proj_w: nn.Linear, scale: float, cosine: bool = False
) -> Tensor:
    """The maps that weigh the values, [B, h, N, N]."""
    maps = mix_heads(scores(q, k, scale, cosine), proj_l.weight, proj_l.bias).softmax(dim=-1)
    return mix_heads(maps, proj_w.weight, proj_w.bias)


def merge_heads(x: Tensor) -> Tensor:
    """[B, h, tokens, k] to [B, tokens, h·k]."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Attention among all tokens, with talking heads: the maps are mixed over heads before and after the softmax.

    "Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. Input and output are [B, N, d].
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.talking_heads, self.backend = config.talking_heads, config.attention_backend
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.qkv = nn.Linear(d, d * 3, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)
        if self.talking_heads:
            self.proj_l = nn.Linear(self.num_heads, self.num_heads)
            self.proj_w = nn.Linear(self.num_heads, self.num_heads)

    def _qkv(self, x: Tensor) -> Tensor:
        """[B, N, d] to [B, N, 3, h, k]"""
        return self.qkv(self.bias_qkv(x)).unflatten(-1, (3, self.num_heads, -1))

    def maps(self, x: Tensor) -> Tensor:
        """The weights of the values that `forward` gives the input x, [B, h, N, N]: a row a query."""
        q, k, _ = self._qkv(x).permute(2, 0, 3, 1, 4).unbind(0)
        if self.talking_heads:
            return talking_maps(q, k, self.proj_l, self.proj_w, self.scale, self.cosine)
        return scores(q, k, self.scale, self.cosine).softmax(dim=-1)

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        qkv = self._qkv(x)
        if self.talking_heads and not self.cosine:
            out = talking_heads_attention(qkv, self.proj_l, self.proj_w, self.scale, self.backend)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
            if self.talking_heads:
                out = merge_heads(talking_maps(q, k, self.proj_l, self.proj_w, self.scale, self.cosine) @ v)
            else:
                out = merge_heads(attend(q, k, v, self.scale, self.cosine))
        return scaled_linear(self.proj, self.bias_proj(out), gamma)


class ClassAttention(nn.Module):
    """Attention with one query, the class token, over itself and the patches.

    Its cost is linear in the number of patches. Input [B, 1 + N, d] with the class token first,
    output [B, 1, d]. A distillation token is a second query beside it: [B, 2 + N, d] to [B, 2, d].
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.queries, self.cls_in_keys = config.num_class_tokens, config.cls_in_keys
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.q = nn.Linear(d, d, bias=config.qkv_bias)
        self.k = nn.Linear(d, d, bias=config.qkv_bias)
        self.v = nn.Linear(d, d, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, h, tokens, k]

    def maps(self, z: Tensor) -> Tensor:
        """The weights of the values that `forward` gives the input z, [B, h, T, keys]: the paper's pictures."""
        z = self.bias_qkv(z)
        keys = z if self.cls_in_keys else z[:, self.queries :]
        q, k = self._split_heads(self.q(z[:, : self.queries])), self._split_heads(self.k(keys))
        return scores(q, k, self.scale, self.cosine).softmax(dim=-1)

    def forward(self, z: Tensor, gamma: Tensor | None = None) -> Tensor:
        z = self.bias_qkv(z)
        keys = z if self.cls_in_keys else z[:, self.queries :]
        q = self._split_heads(self.q(z[:, : self.queries]))
        k, v = self._split_heads(self.k(keys)), self._split_heads(self.v(keys))
        out = attend(q, k, v, self.scale, self.cosine)  # [B, h, 1 or 2, k]
        return scaled_linear(self.proj, self.bias_proj(merge_heads(out)), gamma)


def scores(q: Tensor, k: Tensor, scale: float, cosine: bool) -> Tensor:
    """Scores [B, h, queries, keys] before the softmax: scaled products, or cosine similarities."""
    if cosine:
        norms = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
        return (q @ k.transpose(-2, -1)) / (norms + COSINE_EPS)
    return (q * scale) @ k.transpose(-2, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cosine: bool) -> Tensor:
    """Plain attention, [B, h, queries, k], fused by PyTorch where the scores are products."""
    if cosine:
        return scores(q, k, scale, cosine).softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v, scale=scale)

"""The two attentions of CaiT: among all patches, with talking heads, and from the class token to the patches.

"Talking-Heads Attention", Shazeer et al., arXiv 2003.02436: the maps are mixed over the heads before the softmax, by
W_l, and after it, by W_w. `reference` computes them as published; `recompute` computes the same function, and its
backward pass keeps one map of four.

Shapes: B images, N tokens, d = embed_dim, h heads (g after mixing), k = d / h channels a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cait import plugins, references
from cait.errors import UserError
from cait.model.config import CaiTConfig
from cait.model.residual import scalar_bias, scaled_linear

COSINE_EPS = 1e-6


class SelfAttention(nn.Module):
    """Attention among all tokens, with talking heads: [B, N, d] to [B, N, d]. W_l is proj_l, W_w proj_w."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.talking_heads, self.backend = config.talking_heads, config.attention_backend
        self.attend = backend_named(self.backend)
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.qkv = nn.Linear(d, d * 3, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)
        if self.talking_heads:
            self.proj_l, self.proj_w = (nn.Linear(self.num_heads, self.num_heads) for _ in range(2))

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · attention(x); no γ means 1."""
        qkv = self._qkv(x)
        if self.talking_heads and not self.cosine:
            out = self.attend(qkv, *self._mixers(), self.scale)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
            out = self._weights(q, k) @ v if self.talking_heads else plain_attention(q, k, v, self.scale, self.cosine)
            out = merge_heads(out)
        return scaled_linear(self.proj, self.bias_proj(out), gamma)

    def maps(self, x: Tensor) -> Tensor:
        """The weights that `forward` gives the values for the input x, [B, h, N, N]: a row for each query."""
        q, k, _ = self._qkv(x).permute(2, 0, 3, 1, 4).unbind(0)
        return self._weights(q, k)

    def _qkv(self, x: Tensor) -> Tensor:
        return self.qkv(self.bias_qkv(x)).unflatten(-1, (3, self.num_heads, -1))  # [B, N, 3, h, k]

    def _mixers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        maps = scores(q, k, self.scale, self.cosine)
        return mixed_softmax(maps, *self._mixers()) if self.talking_heads else maps.softmax(dim=-1)


class ClassAttention(nn.Module):
    """Attention from the class token to itself and the patches: [B, 1 + N, d] to [B, 1, d].

    The class token comes first. The cost is linear in the number of patches.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.cls_in_keys = config.cls_in_keys
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.q, self.k, self.v = (nn.Linear(d, d, bias=config.qkv_bias) for _ in range(3))
        self.proj = nn.Linear(d, d)

    def forward(self, z: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · attention(z); no γ means 1."""
        queries, keys = self._queries_and_keys(z)
        q, k, v = (self._split_heads(y) for y in (self.q(queries), self.k(keys), self.v(keys)))
        out = plain_attention(q, k, v, self.scale, self.cosine)  # [B, h, 1, k]
        return scaled_linear(self.proj, self.bias_proj(merge_heads(out)), gamma)

    def maps(self, z: Tensor) -> Tensor:
        """The weights that `forward` gives the values for the input z, [B, h, 1, keys]: the paper's pictures."""
        queries, keys = self._queries_and_keys(z)
        q, k = self._split_heads(self.q(queries)), self._split_heads(self.k(keys))
        return scores(q, k, self.scale, self.cosine).softmax(dim=-1)

    def _queries_and_keys(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = self.bias_qkv(z)
        return z[:, :1], z if self.cls_in_keys else z[:, 1:]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, h, tokens, k]


def merge_heads(x: Tensor) -> Tensor:
    """[B, h, tokens, k] to [B, tokens, h·k]."""
    return x.transpose(1, 2).flatten(2)


def scores(q: Tensor, k: Tensor, scale: float, cosine: bool) -> Tensor:
    """Scores before the softmax, [B, h, queries, keys]: scaled products, or cosine similarities."""
    if cosine:
        norms = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
        return (q @ k.transpose(-2, -1)) / (norms + COSINE_EPS)
    return (q * scale) @ k.transpose(-2, -1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cosine: bool) -> Tensor:
    """Attention without talking heads, [B, h, queries, k]. PyTorch fuses it where the scores are products."""
    if cosine:
        return scores(q, k, scale, cosine).softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def reference(qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float) -> Tensor:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k], by PyTorch's operations."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
    maps = mixed_softmax((q * scale) @ k.transpose(-2, -1), weight_l, bias_l, weight_w, bias_w)
    return (maps @ v).transpose(1, 2).flatten(2)


def mixed_softmax(scores: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor) -> Tensor:
    """The weights of the values for scores [B, h, N, N], of the same shape."""
    return mix_heads(mix_heads(scores, weight_l, bias_l).softmax(dim=-1), weight_w, bias_w)


def mix_heads(maps_BhNN: Tensor, weight_hh: Tensor, bias_h: Tensor) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    One matrix product over [B, h, N·N]. nn.Linear would need the heads last, and so a copy of the maps.
    """
    batch, heads = maps_BhNN.shape[:2]
    mixed = torch.baddbmm(bias_h[:, None], weight_hh.expand(batch, heads, heads), maps_BhNN.flatten(2))
    return mixed.view_as(maps_BhNN)


def recompute(qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float) -> Tensor:
    """The same as `reference`, from a fifth of the memory in training."""
    if torch.compiler.is_exporting() or qkv.is_meta:  # without a backward pass, by operators that every format knows
        return reference(qkv, weight_l, bias_l, weight_w, bias_w, scale)
    return TalkingHeads.apply(qkv, weight_l, bias_l, weight_w, bias_w, scale)


def backend_named(name: str) -> Callable[..., Tensor]:
    """The function for a value of `CaiTConfig.attention_backend`. Raises UserError if there is none."""
    if own := {"recompute": recompute, "reference": reference}.get(name):
        return own
    added = plugins.merged("ATTENTION_BACKENDS")
    if name not in added:
        raise UserError(
            f"attention_backend must be one of {', '.join(['recompute', 'reference', *added])}, got {name!r}"
        )
    return references.locate(added[name])


class TalkingHeads(torch.autograd.Function):
    """Talking-heads attention that saves one of its four N×N maps and recomputes the others.

    The forward pass, where W mixes the heads, is

        S = scale · Q Kᵀ     L = W_l S     P = softmax(L)     A = W_w P     O = A V + b_w Σ_m V

    The backward pass is

        dA = dO Vᵀ     dP = W_wᵀ dA     dL = P ∘ (dP - Σ_m P ∘ dP)     dS = W_lᵀ dL

    and dV, dQ, dK, dW_l, dW_w as usual. Only P is saved, because S and A are one product each. b_l is the same
    for a whole row, so the softmax cancels it and its gradient is 0. b_w reaches the output through the sum
    of V and touches no map. Products are scaled before they are rounded, so float16 holds S where it would
    not hold Q Kᵀ. The maps have the precision of Q, K and V; the softmax sums in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]."""
        B, N, _, h, _ = qkv.shape
        with no_autocast(qkv):
            mix_l, mix_w = _mixers(B, qkv.dtype, weight_l, weight_w)
            heads = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * h, N, -1).contiguous()  # saved in place of qkv
            q, k, v = heads.unbind(0)
            L = _mix(mix_l, scaled_product(q, k.transpose(1, 2), scale))
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
        with no_autocast(heads):
            mix_l, mix_w = _mixers(B, heads.dtype, weight_l, weight_w)
            dO = d_out.view(B, N, h, -1).transpose(1, 2).reshape(B * h, N, -1)
            dV = _mix(mix_w, P).transpose(1, 2) @ dO
            dA = dO @ v.transpose(1, 2)
            dO_sum = _token_sum(dO, B)
            d_bias_w = precise(dO_sum * _token_sum(v, B)).view(B, h, -1).sum(dim=(0, 2))
            d_weight_w = _outer(dA, P, h)
            dP = _mix(mix_w.transpose(1, 2), dA)
            del dA
            dL = torch.ops.aten._softmax_backward_data(dP, P, -1, P.dtype)
            del dP
            d_weight_l = _outer(dL, scaled_product(q, k.transpose(1, 2), ctx.scale), h)
            dS = _mix(mix_l.transpose(1, 2), dL)
            del dL
            dQ, dK = scaled_product(dS, k, ctx.scale), scaled_product(dS.transpose(1, 2), q, ctx.scale)
            d_qkv = torch.stack([d.view(B, h, N, -1).transpose(1, 2) for d in (dQ, dK, dV)], dim=2)
            d_qkv[:, :, 2] += (_per_channel(bias_w, v) * dO_sum).view(B, 1, h, -1)
        gradients = (d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w)
        parameters = (weight_l, bias_l, weight_w, bias_w)
        return d_qkv, *(grad.to(of.dtype) for grad, of in zip(gradients, parameters, strict=True)), None


def no_autocast(x: Tensor) -> Any:
    """Turn autocast off: its softmax returns float32, which takes twice the memory and is then rounded again."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def precise(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mixers(batch: int, dtype: torch.dtype, *weights_hh: Tensor) -> list[Tensor]:
    """W_l and W_w in the precision of the scores, repeated for each image without a copy, [B, h, h]."""
    return [weight.to(dtype).expand(batch, -1, -1) for weight in weights_hh]


def _mix(mixer_Bhh: Tensor, maps: Tensor) -> Tensor:
    """Mix maps [B·h, N, N] over the heads."""
    return torch.bmm(mixer_Bhh, maps.view(*mixer_Bhh.shape[:2], -1)).view_as(maps)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a b for stacks of matrices, scaled before rounding."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def _outer(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Sum a[g] b[h] over images and places of maps [B·h, N, N]: [h, h] in float32 or more."""
    products = a.view(-1, heads, a[0].numel()) @ b.view(-1, heads, b[0].numel()).transpose(1, 2)
    return precise(products).sum(dim=0)


def _per_channel(bias_h: Tensor, heads: Tensor) -> Tensor:
    """Repeat a number a head for each of its channels: [h·k], for heads [B·h, N, k]."""
    return bias_h.to(heads.dtype).repeat_interleave(heads.shape[-1])


def _token_sum(heads: Tensor, batch: int) -> Tensor:
    """Sum heads [B·h, N, k] over the tokens: [B, 1, h·k]."""
    return heads.sum(dim=1).view(batch, 1, -1)

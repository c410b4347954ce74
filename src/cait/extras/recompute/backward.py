"""Hand-written backward passes, which save less of the forward pass and compute the rest again.

`recompute` gives what `cait.model.attention.reference` gives, `gelu_linear` what that of `cait.model.residual` does.

Shapes: B images, N tokens, h heads, k channels a head; maps are [B·h, N, N].
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cait.model.attention import reference
from cait.model.network import precise


def recompute(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> Tensor:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k], as `reference`; see `TalkingHeads`.

    It saves one map where `reference` saves three: .44 of the bytes with 196 tokens and .38 with 576, for k = 48.
    """
    if torch.jit.is_tracing():  # a trace keeps no backward pass of one's own
        return reference(qkv, weight_l, bias_l, weight_w, bias_w, scale)
    return TalkingHeads.apply(qkv, weight_l, bias_l, weight_w, bias_w, scale)


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
        ctx: Any,
        qkv: Tensor,
        weight_l: Tensor,
        bias_l: Tensor,
        weight_w: Tensor,
        bias_w: Tensor,
        scale: float,
    ) -> Tensor:
        """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]."""
        B, N, _, h, _ = qkv.shape
        with no_autocast(qkv):
            mix_l, mix_w = _mixers(B, qkv.dtype, weight_l, weight_w)
            # saved in place of qkv
            heads = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * h, N, -1).contiguous()
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
        B, N, _ = d_out.shape
        h = len(bias_w)
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
            dQ = scaled_product(dS, k, ctx.scale)
            dK = scaled_product(dS.transpose(1, 2), q, ctx.scale)
            d_qkv = torch.stack([d.view(B, h, N, -1).transpose(1, 2) for d in (dQ, dK, dV)], dim=2)
            d_qkv[:, :, 2] += (_per_channel(bias_w, v) * dO_sum).view(B, 1, h, -1)
        gradients = (d_weight_l, torch.zeros_like(bias_l), d_weight_w, d_bias_w)
        parameters = (weight_l, bias_l, weight_w, bias_w)
        return (
            d_qkv,
            *(d.to(parameter.dtype) for d, parameter in zip(gradients, parameters, strict=True)),
            None,
        )


def no_autocast(x: Tensor) -> Any:
    """Turn autocast off: its softmax returns float32, which takes twice the memory and is then rounded again."""
    device = x.device.type
    return (
        torch.autocast(device, enabled=False)
        if torch.amp.is_autocast_available(device)
        else nullcontext()
    )


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


class GeluLinear(torch.autograd.Function):
    """gelu(x) Wᵀ + b for x [..., d], W [e, d] and b [e]. It saves x and W, and computes gelu(x) again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = d_out.flatten(0, -2)
        d_weight = flat.t() @ F.gelu(x).flatten(0, -2)
        return torch.ops.aten.gelu_backward(d_out @ weight, x), d_weight, flat.sum(dim=0)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W gelu(x) + b for x [..., d], W [e, d] and b [e]; without a backward pass by PyTorch's own operations."""
    is_recorded = torch.jit.is_tracing() or torch.compiler.is_exporting()
    if torch.is_grad_enabled() and not is_recorded:
        return GeluLinear.apply(x, weight.to(x.dtype), bias.to(x.dtype))
    return F.linear(F.gelu(x), weight, bias)


recompute.gelu_linear = gelu_linear  # type: ignore[attr-defined]

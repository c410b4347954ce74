"""A CaiT folded for inference: the same logits from fewer operations. It cannot be trained.

README.md has a table of what is folded away.

On the CPU the linear layers are oneDNN's, with packed weights and GELU in the same pass, and attention takes one image
at a time, whose maps stay in the cache.

Shapes: B images, N patches, d = embed_dim, h heads, k = d / h channels a head.
"""

import platform
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cait.model.attention import ClassAttention, SelfAttention, merge_heads
from cait.model.cait import CaiT, Mlp

PART = 2**20
"""The CPU takes at most so many numbers of tokens, B·N·d, at a time: what it computes next is still in the cache."""


@torch.no_grad()
def fold(network: nn.Module, portable: bool = False) -> nn.Module:
    """Fold each CaiT in a network that is in evaluation. It changes the network; take the one that it returns.

    A subclass of CaiT, as the paper's ablations, which may read what is folded away, and weights in float16, where γW
    would vanish, stay as they are. If it is `portable` it has only operators that every format of `cait export` knows.
    """
    found: list[Any] = [part for part in network.modules() if type(part) is CaiT]
    for cait in found:
        if cait.pos_embed.dtype == torch.float16 or hasattr(cait, "folded"):
            continue
        cait.folded = True
        _fold_weights(cait)
        packed = not portable and can_pack(cait.pos_embed)
        for block in cait.modules():
            for name, part in [*block.named_children()]:
                if (form := _folded_form(part, portable, packed)) is not None:
                    setattr(block, name, form)
        if packed and cait is network:
            network = InParts(cait)
    return network.eval().requires_grad_(False)


def can_pack(weights: Tensor) -> bool:
    """Whether oneDNN can run linear layers of these weights here."""
    on_x86 = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
    return on_x86 and weights.device.type == "cpu" and weights.dtype == torch.float32


def _folded_form(part: nn.Module, portable: bool, packed: bool) -> nn.Module | None:
    """What takes the place of a part of the network, or None."""
    if isinstance(part, ClassAttention):
        return AbsorbedAttention(part)
    if isinstance(part, SelfAttention) and (portable or packed):
        return TalkingHeads(part, packed)
    return PackedMlp(part) if isinstance(part, Mlp) and packed else None


def _fold_weights(cait: CaiT) -> None:
    """Fold what is a change of weights alone."""
    for block in [*cait.blocks, *cait.blocks_token_only]:
        attn = block.attn
        mlp = block.mlp
        readers = [attn.qkv] if isinstance(attn, SelfAttention) else [attn.q, attn.k, attn.v]
        block.norm1 = _folded_norm(block.norm1, readers)
        block.norm2 = _folded_norm(block.norm2, [mlp.fc1])
        _scale(attn.proj, block.gamma_1)
        _scale(mlp.fc2, block.gamma_2)
        block.gamma_1 = None
        block.gamma_2 = None
        scales = torch.ones_like(readers[0].bias)
        scales[: attn.proj.in_features] = attn.scale
        _scale(readers[0], scales)
        attn.scale = 1.0
    cait.norm = _folded_norm(cait.norm, [cait.head])


def _scale(linear: Any, factors: Tensor) -> None:
    """γ(Wx + b) = (γW)x + γb"""
    linear.weight = _fixed(factors[:, None] * linear.weight)
    linear.bias = _fixed(factors * linear.bias)


def _folded_norm(norm: Any, readers: Iterable[Any]) -> nn.LayerNorm:
    """A layer norm without s and t, which its readers take in: W(s·x + t) + b = (W·s)x + (Wt + b)."""
    for linear in readers:
        if linear.bias is None:
            linear.bias = _fixed(linear.weight.new_zeros(linear.out_features))
        linear.bias = _fixed(linear.bias + linear.weight @ norm.bias)
        linear.weight = _fixed(linear.weight * norm.weight)
    return nn.LayerNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)


class InParts(nn.Module):
    """A network that takes a batch part by part."""

    def __init__(self, cait: Any) -> None:
        super().__init__()
        self.cait = cait
        self.images = max(1, PART // cait.pos_embed.numel())

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.cait(part) for part in images.split(self.images)])


class PackedLinear(nn.Module):
    """gelu(Wx + b), or Wx + b, in float32 on the CPU, with W in oneDNN's own order."""

    def __init__(self, linear: nn.Linear, gelu: bool = False) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias
        self.after: Any = ("gelu", [], "none") if gelu else ("none", [], "")

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *self.after)


class PackedMlp(nn.Module):
    """`cait.model.cait.Mlp` without γ."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.fc1 = PackedLinear(mlp.fc1, gelu=True)
        self.fc2 = PackedLinear(mlp.fc2)

    def forward(self, x: Tensor, gamma: None = None) -> Tensor:
        return self.fc2(self.fc1(x))


class TalkingHeads(nn.Module):
    """`cait.model.attention.SelfAttention` without γ and without a backward pass."""

    def __init__(self, attn: SelfAttention, packed: bool) -> None:
        super().__init__()
        self.num_heads = attn.num_heads
        self.packed = packed
        self.qkv, self.proj = (
            PackedLinear(layer) if packed else layer for layer in (attn.qkv, attn.proj)
        )
        self.mix_l = attn.proj_l.weight
        self.mix_w = attn.proj_w.weight
        self.bias_w = _fixed(
            attn.proj_w.bias.repeat_interleave(attn.proj.in_features // attn.num_heads)
        )

    def forward(self, x: Tensor, gamma: None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, N, 3, h, k]
        values = (
            torch.cat([self._attend(image[None]) for image in qkv])
            if self.packed
            else self._attend(qkv)
        )
        return self.proj(values + self.bias_w * qkv[:, :, 2].flatten(2).sum(dim=1, keepdim=True))

    def _attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
        scores = q @ k.transpose(-2, -1)
        weights = (self.mix_l @ scores.flatten(2)).view_as(scores).softmax(dim=-1)
        return merge_heads((self.mix_w @ weights.flatten(2)).view_as(scores) @ v)


class AbsorbedAttention(nn.Module):
    """`cait.model.attention.ClassAttention` on the tokens themselves, without γ.

    A class token's score for a token z is q·(W_k z + b_k) = (W_kᵀq)·z and a term that the softmax cancels; the mean of
    the values is W_v times the mean of the tokens, and b_v. So no key or value is computed.
    """

    def __init__(self, attn: ClassAttention) -> None:
        super().__init__()
        self.q = attn.q
        by_head = (attn.num_heads, -1, attn.q.in_features)  # [h, k, d]
        self.keys, self.values = (_fixed(layer.weight.view(by_head)) for layer in (attn.k, attn.v))
        self.proj = attn.proj
        self.proj.bias = _fixed(attn.proj.bias + attn.proj.weight @ attn.v.bias)

    def forward(self, z: Tensor, gamma: None = None) -> Tensor:
        """[B, T + N, d] to [B, T, d]"""
        maps = self.maps(z)
        means = (maps.flatten(1, 2) @ z).unflatten(1, maps.shape[1:3])  # [B, h, T, d]
        return self.proj(merge_heads(means @ self.values.transpose(1, 2)))

    def maps(self, z: Tensor) -> Tensor:
        """The weights of the tokens, [B, h, T, keys]."""
        q = self.q(z[:, :1]).unflatten(-1, (len(self.keys), -1)).transpose(1, 2)  # [B, h, T, k]
        asked = q @ self.keys  # [B, h, T, d]
        return (
            (asked.flatten(1, 2) @ z.transpose(1, 2)).unflatten(1, asked.shape[1:3]).softmax(dim=-1)
        )

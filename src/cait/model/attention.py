"""The two attentions of CaiT.

Shapes: B images, N patches, h heads, d = embed_dim, k = d / h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cait.model.config import CaiTConfig
from cait.model.residual import scalar_bias

COSINE_EPS = 1e-6


def mix_heads(maps_BhNN: Tensor, mixer: nn.Linear) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    Written as one matrix product over [B, h, N·N], so that the maps are not permuted (and copied)
    to bring the heads last, as nn.Linear would have it.
    """
    batch, heads = maps_BhNN.shape[:2]
    weight = mixer.weight.expand(batch, heads, heads)
    mixed = torch.baddbmm(mixer.bias[:, None], weight, maps_BhNN.flatten(2))
    return mixed.view_as(maps_BhNN)


class SelfAttention(nn.Module):
    """Attention among all tokens, with talking heads: the maps are mixed over heads before and after the softmax.

    "Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. Input and output are [B, N, d].
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.talking_heads = config.talking_heads
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.qkv = nn.Linear(d, d * 3, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)
        if self.talking_heads:
            self.proj_l = nn.Linear(self.num_heads, self.num_heads)
            self.proj_w = nn.Linear(self.num_heads, self.num_heads)

    def forward(self, x: Tensor) -> Tensor:
        B, N, d = x.shape
        qkv = self.qkv(self.bias_qkv(x)).reshape(B, N, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
        if self.talking_heads:
            maps = mix_heads(scores(q, k, self.scale, self.cosine), self.proj_l).softmax(dim=-1)  # [B, h, N, N]
            out = mix_heads(maps, self.proj_w) @ v
        else:
            out = attend(q, k, v, self.scale, self.cosine)
        return self.proj(self.bias_proj(out.transpose(1, 2).reshape(B, N, d)))


class ClassAttention(nn.Module):
    """Attention with one query, the class token, over itself and the patches.

    Its cost is linear in the number of patches. Input [B, 1 + N, d] with the class token first,
    output [B, 1, d].
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, self.num_heads = config.embed_dim, config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.cls_in_keys = config.cls_in_keys
        self.bias_qkv, self.bias_proj = scalar_bias(config), scalar_bias(config)
        self.q = nn.Linear(d, d, bias=config.qkv_bias)
        self.k = nn.Linear(d, d, bias=config.qkv_bias)
        self.v = nn.Linear(d, d, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, h, tokens, k]

    def forward(self, z: Tensor) -> Tensor:
        z = self.bias_qkv(z)
        keys = z if self.cls_in_keys else z[:, 1:]
        q = self._split_heads(self.q(z[:, :1]))
        k, v = self._split_heads(self.k(keys)), self._split_heads(self.v(keys))
        out = attend(q, k, v, self.scale, self.cosine)  # [B, h, 1, k]
        return self.proj(self.bias_proj(out.transpose(1, 2).flatten(2)))


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

"""The two attentions of CaiT.

Shapes: B images, N patches, h heads, d = embed_dim, k = d / h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mix_heads(maps_BhNN: Tensor, mixer: nn.Linear) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    Written as one matrix product over [B, h, N·N], so that the maps are not permuted (and copied)
    to bring the heads last, as nn.Linear would have it.
    """
    batch, heads = maps_BhNN.shape[:2]
    weight = mixer.weight.expand(batch, heads, heads)
    mixed = torch.baddbmm(mixer.bias[:, None], weight, maps_BhNN.flatten(2))
    return mixed.view_as(maps_BhNN)


class TalkingHeadAttention(nn.Module):
    """Self-attention among patches whose heads are mixed before and after the softmax.

    "Talking-Heads Attention", Shazeer et al., arXiv 2003.02436. Input and output are [B, N, d].
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        B, N, d = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, k]
        maps = (q * self.scale) @ k.transpose(-2, -1)  # [B, h, N, N]
        maps = mix_heads(maps, self.proj_l).softmax(dim=-1)
        maps = mix_heads(maps, self.proj_w)
        out = (maps @ v).transpose(1, 2).reshape(B, N, d)
        return self.proj(out)


class ClassAttention(nn.Module):
    """Attention with one query, the class token, over itself and the patches.

    Its cost is linear in the number of patches. Input [B, 1 + N, d] with the class token first,
    output [B, 1, d].
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, h, tokens, k]

    def forward(self, z: Tensor) -> Tensor:
        q = self._split_heads(self.q(z[:, :1]))
        k, v = self._split_heads(self.k(z)), self._split_heads(self.v(z))
        out = F.scaled_dot_product_attention(q, k, v)  # [B, h, 1, k]
        return self.proj(out.transpose(1, 2).flatten(2))

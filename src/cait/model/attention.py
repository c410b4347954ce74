"""The two attentions of CaiT: among all patches, and from the class token to the patches.

Shapes: B images, N patches, d = embed_dim, h heads, k = d / h channels a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from cait.model.config import CaiTConfig
from cait.model.residual import scalar_bias, scaled_linear
from cait.model.talking_heads import backend_named, mixed_softmax

COSINE_EPS = 1e-6


class SelfAttention(nn.Module):
    """Attention among all tokens, with talking heads: [B, N, d] to [B, N, d].

    The maps are mixed over the heads before the softmax (proj_l) and after it (proj_w), see
    `cait.model.talking_heads`.
    """

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

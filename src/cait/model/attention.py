"""The two attentions of CaiT: among all patches, with talking heads, and from the class token to the patches.

"Talking-Heads Attention", Shazeer et al., arXiv 2003.02436: the maps are mixed over the heads before the softmax, by
W_l, and after it, by W_w.

Shapes: B images, N tokens, d = embed_dim, h heads (g after mixing), k = d / h channels a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cait import plugins, references
from cait.errors import UserError
from cait.model.config import CaiTConfig
from cait.model.residual import scaled_linear


class SelfAttention(nn.Module):
    """Attention among all tokens, with talking heads: [B, N, d] to [B, N, d]. W_l is proj_l, W_w proj_w."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d = config.embed_dim
        self.num_heads = config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.attend = backend_named(config.attention_backend)
        self.attention_backend = self.attend.__name__
        self.qkv = nn.Linear(d, d * 3, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)
        self.proj_l = nn.Linear(self.num_heads, self.num_heads)
        self.proj_w = nn.Linear(self.num_heads, self.num_heads)

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · attention(x) for x [B, N, d] and γ [d]; no γ means 1."""
        return scaled_linear(self.proj, self.attended(self.split(x)), gamma)

    def maps(self, x: Tensor) -> Tensor:
        """The weights that `forward` gives the values for x [B, N, d]: [B, h, N, N], a row for each query."""
        q, k, _ = by_heads(self.split(x))
        return self.weights(q, k)

    def split(self, x: Tensor) -> Tensor:
        """Queries, keys and values of each head for x [B, N, d]: [B, N, 3, h, k]."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1))

    def mixers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_l [h, h], its bias [h], W_w and its bias."""
        return self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights of the values for q and k [B, h, N, k]: [B, h, N, N]."""
        return mixed_softmax((q * self.scale) @ k.transpose(-2, -1), *self.mixers())

    def attended(self, qkv: Tensor) -> Tensor:
        """[B, N, 3, h, k] to [B, N, d]: without a backward pass by operators that every format knows."""
        attend = reference if torch.compiler.is_exporting() or qkv.is_meta else self.attend
        return attend(qkv, *self.mixers(), self.scale)


class ClassAttention(nn.Module):
    """Attention from the class token to itself and the patches: [B, 1 + N, d] to [B, 1, d].

    The class token comes first. The cost is linear in the number of patches.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d = config.embed_dim
        self.num_heads = config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.q = nn.Linear(d, d, bias=config.qkv_bias)
        self.k = nn.Linear(d, d, bias=config.qkv_bias)
        self.v = nn.Linear(d, d, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)

    def forward(self, z: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · attention(z) for z [B, 1 + N, d] and γ [d]; no γ means 1."""
        return scaled_linear(self.proj, self.attended(*self.heads(z, z)), gamma)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A query, keys and values [B, h, tokens, k] to [B, 1, d]."""
        return merge_heads(F.scaled_dot_product_attention(q, k, v, scale=self.scale))

    def maps(self, z: Tensor) -> Tensor:
        """The weights that `forward` gives the values for z [B, 1 + N, d]: [B, h, 1, 1 + N], the paper's pictures."""
        q, k, _ = self.heads(z, z)
        return self.weights(q, k)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights of the values for q and k [B, h, tokens, k]: [B, h, 1, tokens]."""
        return ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)

    def heads(self, z: Tensor, keys: Tensor) -> list[Tensor]:
        """Query, keys and values [B, h, tokens, k] of the class token in z and of the tokens `keys`, [B, tokens, d]."""
        projected = self.q(z[:, :1]), self.k(keys), self.v(keys)
        return [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected]


def by_heads(qkv: Tensor) -> tuple[Tensor, ...]:
    """[B, N, 3, h, k] to queries, keys and values, each [B, h, N, k]."""
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def merge_heads(x: Tensor) -> Tensor:
    """[B, h, tokens, k] to [B, tokens, h·k]."""
    return x.transpose(1, 2).flatten(2)


def reference(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> Tensor:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k], as published, by PyTorch's operations."""
    q, k, v = by_heads(qkv)
    return merge_heads(
        mixed_softmax((q * scale) @ k.transpose(-2, -1), weight_l, bias_l, weight_w, bias_w) @ v
    )


def mixed_softmax(
    scores: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor
) -> Tensor:
    """W_w softmax(W_l scores), the weights of the values, for scores [B, h, N, N], of the same shape."""
    return mix_heads(mix_heads(scores, weight_l, bias_l).softmax(dim=-1), weight_w, bias_w)


def mix_heads(maps_BhNN: Tensor, weight_hh: Tensor, bias_h: Tensor) -> Tensor:
    """Apply an h×h linear map over the heads: out[b,g,n,m] = Σ_h W[g,h] maps[b,h,n,m] + bias[g].

    One matrix product over [B, h, N·N]. nn.Linear would need the heads last, and so a copy of the maps.
    """
    batch, heads = maps_BhNN.shape[:2]
    mixed = torch.baddbmm(
        bias_h[:, None], weight_hh.expand(batch, heads, heads), maps_BhNN.flatten(2)
    )
    return mixed.view_as(maps_BhNN)


def backend_named(name: str) -> Callable[..., Tensor]:
    """What an `attention_backend` names: it computes what `reference` does. Raises UserError if there is none.

    An extra may add "default", the one of networks that name none. It may have an attribute `gelu_linear`, which then
    computes what `cait.model.residual.gelu_linear` does.
    """
    paths = dict.fromkeys(("default", "reference"), "cait.model.attention:reference")
    paths |= plugins.by_name("ATTENTION_BACKENDS")
    if name not in paths:
        raise UserError(f"attention_backend must be one of {', '.join(paths)}, got {name!r}")
    return references.locate(paths[name])

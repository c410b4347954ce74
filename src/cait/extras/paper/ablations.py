"""The networks that the paper compares CaiT with: other residual branches, attention, norms and class tokens; DeiT.

Every form of the residual connection except "none" is x + drop_path(γ · branch(x)). They differ in γ and in the initial
weights of the branch:

| residual   | γ                                              | initial weights of the branch         |
|------------|------------------------------------------------|---------------------------------------|
| layerscale | λ ∈ R^d at ε, or uniform in [0, 2ε]            | as everywhere                         |
| plain      | none                                           | as everywhere                         |
| rezero     | a scalar at 0 (Bachlechner et al., 2003.04887) | as everywhere                         |
| skipinit   | the same (De & Smith, 2002.10444)              | as everywhere                         |
| scalar     | a scalar at ε                                  | as everywhere                         |
| fixup      | a scalar at 1 (Zhang et al., 1901.09321)       | `scale_as_fixup`; scalar biases       |
| t-fixup    | none (Huang et al., ICML 2020)                 | `scale_as_t_fixup`                    |
| none       | none, and no x: the branch alone               | as everywhere                         |

All of them keep LayerNorm and warm-up, as in the paper's Table 1, so ReZero and SkipInit are the same here.
The authors did not release their Fixup and T-Fixup; these follow the original papers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait.errors import UserError
from cait.model.attention import (
    ClassAttention,
    SelfAttention,
    backend_named,
    by_heads,
    merge_heads,
    mixed_softmax,
)
from cait.model.cait import Block, CaiT, ClassAttentionBlock, SelfAttentionBlock, layer_norm
from cait.model.config import CaiTConfig
from cait.model.residual import DropPath, Sample, sampled, sampled_scale, scaled_linear
from cait.settings import NonNegativeInt

COSINE_EPS = 1e-6
SCALAR_START = {"rezero": 0.0, "skipinit": 0.0, "fixup": 1.0}


@dataclass(frozen=True)
class Ablations(CaiTConfig):
    """The fields of CaiT and of the paper's ablations. The defaults build CaiT, others DeiT and more."""

    network: ClassVar[str] = "cait.extras.paper.ablations:AblatedCaiT"

    depth_token_only: NonNegativeInt = 2
    """Number of class-attention blocks."""
    residual: Literal[
        "layerscale", "plain", "rezero", "skipinit", "scalar", "fixup", "t-fixup", "none"
    ] = "layerscale"
    """The form of the residual branch."""
    layer_scale_dist: Literal["constant", "uniform"] = "constant"
    """Start all λ at ε, or draw them uniformly from [0, 2ε]."""
    layer_scale_token_only: bool = True
    """Whether the class-attention blocks have LayerScale too."""
    talking_heads: bool = True
    attention: Literal["dot", "cosine"] = "dot"
    """Scores q·k / sqrt(d/h), or q·k / (|q||k| + 1e-6)."""
    cls_in_keys: bool = True
    """Whether class attention has the class token among its keys."""
    class_token_at: NonNegativeInt | None = None
    """The class token joins the patches before this self-attention block; None leaves it to class attention."""
    global_pool: Literal["token", "avg"] = "token"
    """The head reads the class token, or the mean of the patches of a network without one."""
    norm: Literal["layernorm", "batchnorm"] = "layernorm"
    act: Literal["gelu", "leaky_relu"] = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        at = self.class_token_at
        if at is not None and at not in range(self.depth):
            raise UserError(
                f"class_token_at must be null or the number of one of the {self.depth} blocks, got {at}"
            )
        if self.global_pool == "avg" and (at is not None or self.depth_token_only):
            raise UserError(
                "global_pool avg has no class token: depth_token_only must be 0 and class_token_at null"
            )
        if self.global_pool == "token" and at is None and not self.depth_token_only:
            raise UserError(
                "the class token is never updated: set class_token_at or depth_token_only"
            )


class AblatedSelfAttention(SelfAttention):
    """`SelfAttention` without talking heads, with scores of cosine similarity, or with Fixup's biases."""

    def __init__(self, config: Any) -> None:
        # not the constructor of SelfAttention, which has talking heads in any case
        nn.Module.__init__(self)
        d = config.embed_dim
        self.num_heads = config.num_heads
        self.scale = (d // self.num_heads) ** -0.5
        self.cosine = config.attention == "cosine"
        self.attend = backend_named(config.attention_backend)
        self.attention_backend = (
            self.attend.__name__ if config.talking_heads and not self.cosine else ""
        )
        self.bias_qkv = scalar_bias(config)
        self.bias_proj = scalar_bias(config)
        self.qkv = nn.Linear(d, d * 3, bias=config.qkv_bias)
        self.proj = nn.Linear(d, d)
        self.talking_heads = config.talking_heads
        if self.talking_heads:
            self.proj_l = nn.Linear(self.num_heads, self.num_heads)
            self.proj_w = nn.Linear(self.num_heads, self.num_heads)

    def split(self, x: Tensor) -> Tensor:
        return super().split(self.bias_qkv(x))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        maps = scores(q, k, self.scale, self.cosine)
        return mixed_softmax(maps, *self.mixers()) if self.talking_heads else maps.softmax(dim=-1)

    def attended(self, qkv: Tensor) -> Tensor:
        if self.attention_backend:
            return self.bias_proj(super().attended(qkv))
        q, k, v = by_heads(qkv)
        if self.talking_heads or self.cosine:
            out = self.weights(q, k) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.bias_proj(merge_heads(out))


class AblatedClassAttention(ClassAttention):
    """`ClassAttention` without the class token among its keys, with cosine similarity, or with Fixup's biases."""

    bias_qkv: nn.Module
    bias_proj: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.cosine = config.attention == "cosine"
        self.cls_in_keys = config.cls_in_keys
        add_biases(self, config, "bias_qkv", "bias_proj")

    def heads(self, z: Tensor, keys: Tensor) -> list[Tensor]:
        z = self.bias_qkv(z)
        return super().heads(z, z if self.cls_in_keys else z[:, 1:])

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = merge_heads(self.weights(q, k) @ v) if self.cosine else super().attended(q, k, v)
        return self.bias_proj(out)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return scores(q, k, self.scale, self.cosine).softmax(dim=-1)


def scores(q: Tensor, k: Tensor, scale: float, cosine: bool) -> Tensor:
    """Scores before the softmax, [B, h, queries, keys]: scaled products, or cosine similarities."""
    if cosine:
        norms = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
        return (q @ k.transpose(-2, -1)) / (norms + COSINE_EPS)
    return (q * scale) @ k.transpose(-2, -1)


class AblatedMlp(nn.Module):
    """The layers of an `Mlp` with another activation, or with Fixup's biases before each layer."""

    def __init__(self, config: Any, mlp: Any) -> None:
        super().__init__()
        self.bias_fc1, self.bias_act, self.bias_fc2 = (scalar_bias(config) for _ in range(3))
        self.fc1 = mlp.fc1
        self.fc2 = mlp.fc2
        self.act = nn.LeakyReLU() if config.act == "leaky_relu" else nn.GELU()

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        hidden = self.act(self.bias_act(self.fc1(self.bias_fc1(x))))
        return scaled_linear(self.fc2, self.bias_fc2(hidden), gamma)


class AblatedBlock(Block):
    """What the two kinds of ablated blocks have in common."""

    def __init__(self, config: Any, attn: nn.Module, drop_path_rate: float) -> None:
        Block.__init__(self, config, attn, drop_path_rate)
        self.norm1 = norm_layer(config)
        self.norm2 = norm_layer(config)
        if config.act != "gelu" or config.residual == "fixup":
            self.mlp = AblatedMlp(config, self.mlp)
        self.skip = config.residual != "none"
        if not self.skip:
            self.drop_path = DropPath(drop_path_rate, "mask")

    def layer_scale(self, config: Any) -> nn.Parameter | None:
        """γ of a branch: a vector [d] for LayerScale, [1] for a scalar, None for the forms without."""
        if isinstance(self, ClassAttentionBlock) and not config.layer_scale_token_only:
            return None
        if config.residual == "layerscale":
            start = torch.full((config.embed_dim,), config.epsilon)
            if config.layer_scale_dist == "uniform":
                start = start.uniform_(0.0, 2 * config.epsilon)
            return nn.Parameter(start)
        if config.residual in ("plain", "t-fixup", "none"):
            return None
        return nn.Parameter(torch.full((1,), SCALAR_START.get(config.residual, config.epsilon)))

    def add(self, x: Tensor, y: Tensor, sample: Sample = None) -> Tensor:
        return super().add(x, y, sample) if self.skip else self.drop_path(y)


class AblatedSelfAttentionBlock(AblatedBlock, SelfAttentionBlock):
    """`SelfAttentionBlock`, ablated."""

    def __init__(self, config: Any) -> None:
        AblatedBlock.__init__(self, config, AblatedSelfAttention(config), config.drop_path_rate)

    def body(self, x: Tensor, sample_1: Sample, sample_2: Sample) -> Tensor:
        y = normed(self.norm1, sampled(x, sample_1))
        x = self.add(x, self.attn(y, sampled_scale(self.gamma_1, sample_1)), sample_1)
        y = normed(self.norm2, sampled(x, sample_2))
        return self.add(x, self.mlp(y, sampled_scale(self.gamma_2, sample_2)), sample_2)


class AblatedClassAttentionBlock(AblatedBlock, ClassAttentionBlock):
    """`ClassAttentionBlock`, ablated."""

    def __init__(self, config: Any) -> None:
        AblatedBlock.__init__(self, config, AblatedClassAttention(config), 0.0)

    def body(self, x: Tensor, cls: Tensor) -> Tensor:
        cls = self.add(cls, self.attn(normed(self.norm1, torch.cat((cls, x), dim=1)), self.gamma_1))
        return self.add(cls, self.mlp(normed(self.norm2, cls), self.gamma_2))


class AblatedCaiT(CaiT):
    """CaiT with any of the ablations: images [B, C, S, S] to logits [B, num_classes]."""

    config: Any
    blocks_of = (AblatedSelfAttentionBlock, AblatedClassAttentionBlock)

    def draw_weights(self) -> None:
        """Give the network its other tokens and norm, then draw; the last step of the constructor."""
        at = self.config.class_token_at
        if self.config.global_pool == "avg":
            del self.cls_token
            self.global_pool = "avg"
            self.num_prefix_tokens = 0
        # a class token that is there from the first block on has a position too, as in DeiT
        if at == 0:
            self.pos_embed = nn.Parameter(
                torch.zeros(1, self.config.num_patches + 1, self.config.embed_dim)
            )
        elif at is not None:
            self.blocks[at].register_forward_pre_hook(self._prepend)
        self.norm = norm_layer(self.config)
        super().draw_weights()
        blocks = [*self.blocks, *self.blocks_token_only]
        if self.config.residual == "fixup":
            scale_as_fixup(blocks, self.head)
        elif self.config.residual == "t-fixup":
            scale_as_t_fixup(blocks)

    def forward_class(self, x: Tensor) -> Tensor:
        """All tokens after the last norm: [B, 1 + N, d] with the class token first, [B, N, d] without one."""
        if self.config.class_token_at is not None:
            cls = x[:, :1]
            x = x[:, 1:]
        else:
            cls = (
                x[:, :0]
                if self.config.global_pool == "avg"
                else self.cls_token.repeat(x.shape[0], 1, 1)
            )
        for block in self.blocks_token_only:
            cls = block(x, cls)
        return normed(self.norm, torch.cat((cls, x), dim=1))

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, S, S] to [B, N, d], or to [B, 1 + N, d] if the class token is there from the first block on."""
        x = super().embed(images)
        return self._prepend(None, (x,))[0] if self.config.class_token_at == 0 else x

    def _prepend(self, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a block is given, with the class token before the tokens [B, N, d], which come first."""
        x, *samples = given
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1), *samples


def norm_layer(config: Any) -> nn.Module:
    return nn.BatchNorm1d(config.embed_dim) if config.norm == "batchnorm" else layer_norm(config)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` over the channels of tokens [B, N, d]. A batch norm, SyncBatchNorm included, takes [B, d, N]."""
    return norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(norm, _BatchNorm) else norm(x)


class ScalarBias(nn.Module):
    """Fixup's learnable scalar, added before a linear layer or an activation; starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def scalar_bias(config: Any) -> nn.Module:
    """A `ScalarBias` under Fixup, else an Identity, which adds no name to a checkpoint."""
    return ScalarBias() if config.residual == "fixup" else nn.Identity()


def add_biases(module: Any, config: Any, *names: str) -> None:
    """Add Fixup's biases before the other parts of a module: states of optimizers have them in this order."""
    module._modules = {name: scalar_bias(config) for name in names} | module._modules


@torch.no_grad()
def scale_as_fixup(blocks: list[Any], head: nn.Linear) -> None:
    """Fixup: set the classifier and the last layer of every branch to 0, scale its first layer by L^(-1/(2m-2)).

    L is the number of branches, two a block, of m = 2 layers each (qkv and proj, fc1 and fc2).
    """
    nn.init.zeros_(head.weight)
    for name, layer in _linear_layers(blocks):
        if name in ("attn.proj", "mlp.fc2"):
            nn.init.zeros_(layer.weight)
        elif name in ("attn.qkv", "attn.q", "attn.k", "attn.v", "mlp.fc1"):
            layer.weight.mul_((2 * len(blocks)) ** -0.5)


@torch.no_grad()
def scale_as_t_fixup(blocks: list[Any]) -> None:
    """T-Fixup: Xavier, then scale value, attention output and FFN weights by 0.67 · L^(-1/4) for L blocks."""
    factor = 0.67 * len(blocks) ** -0.25
    for name, layer in _linear_layers(blocks):
        if name in ("attn.proj_l", "attn.proj_w"):
            continue
        weights = layer.weight.chunk(3 if name == "attn.qkv" else 1)
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if name in ("attn.qkv", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2"):
            weights[-1].mul_(factor)  # of qkv the values


def _linear_layers(blocks: list[Any]) -> list[tuple[str, nn.Linear]]:
    """The linear layers of each block by their name in it."""
    return [
        pair for block in blocks for pair in block.named_modules() if isinstance(pair[1], nn.Linear)
    ]

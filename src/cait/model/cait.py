"""The whole network, top to bottom.

Parameter names, order and shapes are those of timm's `cait_*` and of the released weights, so that
either loads as it is. Shapes: B images, N patches, d = embed_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cait.errors import UserError
from cait.model.attention import ClassAttention, TalkingHeadAttention
from cait.model.config import CaiTConfig, variant_config
from cait.model.residual import DropPath, layer_scale

LAYER_NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each: [B, C, H, W] to [B, N, d]."""

    def __init__(self, in_chans: int, patch_size: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    """The feed-forward branch: d to `hidden` to d with a GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SelfAttentionBlock(nn.Module):
    """x + λ₁ SA(norm(x)), then x + λ₂ FFN(norm(x)), on patches only."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d = config.embed_dim
        self.gamma_1 = layer_scale(d, config.epsilon)
        self.gamma_2 = layer_scale(d, config.epsilon)
        self.norm1 = nn.LayerNorm(d, eps=LAYER_NORM_EPS)
        self.attn = TalkingHeadAttention(d, config.num_heads, config.qkv_bias)
        self.drop_path = DropPath(config.drop_path_rate)
        self.norm2 = nn.LayerNorm(d, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(d, int(d * config.mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class ClassAttentionBlock(nn.Module):
    """The same for the class token alone: the patches are read, never written; no stochastic depth."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d = config.embed_dim
        self.gamma_1 = layer_scale(d, config.epsilon)
        self.gamma_2 = layer_scale(d, config.epsilon)
        self.norm1 = nn.LayerNorm(d, eps=LAYER_NORM_EPS)
        self.attn = ClassAttention(d, config.num_heads, config.qkv_bias)
        self.norm2 = nn.LayerNorm(d, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(d, int(d * config.mlp_ratio))

    def forward(self, x: Tensor, cls: Tensor) -> Tensor:
        z = torch.cat((cls, x), dim=1)  # [B, 1 + N, d]
        cls = cls + self.gamma_1 * self.attn(self.norm1(z))
        return cls + self.gamma_2 * self.mlp(self.norm2(cls))


class CaiT(nn.Module):
    """Class-attention in image Transformers: images [B, in_chans, img_size, img_size] to logits [B, num_classes]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.config = config
        d = config.embed_dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches, d))
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, d)
        self.blocks = nn.Sequential(*(SelfAttentionBlock(config) for _ in range(config.depth)))
        self.blocks_token_only = nn.ModuleList(ClassAttentionBlock(config) for _ in range(config.depth_token_only))
        self.norm = nn.LayerNorm(d, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(d, config.num_classes)

        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        # The patch projection keeps PyTorch's default, as in the released code.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of two and more dimensions that are not decayed."""
        return {"pos_embed", "cls_token"}

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, [B, 1 + N, d], the class token first."""
        size = self.config.img_size
        if images.shape[-2:] != (size, size):
            raise UserError(f"the model takes {size}×{size} pixels, got {images.shape[-2]}×{images.shape[-1]}")
        x = self.patch_embed(images) + self.pos_embed
        x = self.blocks(x)
        cls = self.cls_token.expand(images.shape[0], -1, -1)
        for block in self.blocks_token_only:
            cls = block(x, cls)
        return self.norm(torch.cat((cls, x), dim=1))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.forward_features(images)[:, 0])


def create_model(
    name: str,
    img_size: int = 224,
    num_classes: int = 1000,
    drop_path_rate: float | None = None,
    **fields: Any,
) -> CaiT:
    """Build one of the paper's models with fresh weights.

    Args:
        name: a row of `cait.model.config.VARIANTS`: xxs24, xxs36, xs24, xs36, s24, s36, s48, m24, m36, m48.
        img_size: side of the square input in pixels, a multiple of the patch size.
        num_classes: width of the head.
        drop_path_rate: stochastic depth; None takes the paper's rate for this model.
        fields: any other field of `cait.model.config.CaiTConfig`.

    Raises:
        UserError: unknown name or field, or sizes that do not fit together.
    """
    config = variant_config(name, img_size=img_size, num_classes=num_classes, drop_path_rate=drop_path_rate, **fields)
    return CaiT(config)

"""The whole network, top to bottom.

Parameter names, order and shapes are those of timm's `cait_*` and of the released weights, so that
either loads as it is. Shapes: B images, N patches, d = embed_dim, T = 1 class token, or 2 with the
distillation token, whose names are DeiT's and timm's too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from cait.errors import UserError
from cait.model.attention import ClassAttention, SelfAttention
from cait.model.config import CaiTConfig, variant_config
from cait.model.residual import (
    DropPath,
    Kept,
    draw_kept,
    drop_path_rates,
    init_fixup,
    init_t_fixup,
    residual_scale,
    scalar_bias,
    scaled_linear,
)
from cait.model.weights import load_pretrained


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each: [B, C, H, W] to [B, N, d]."""

    def __init__(self, in_chans: int, patch_size: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2).contiguous()


def norm_layer(config: CaiTConfig) -> nn.Module:
    return nn.BatchNorm1d(config.embed_dim) if config.norm == "batchnorm" else nn.LayerNorm(config.embed_dim, eps=1e-6)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` over the channels of tokens [B, N, d]. A batch norm, even made a SyncBatchNorm, wants [B, d, N]."""
    return norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(norm, _BatchNorm) else norm(x)


class Mlp(nn.Module):
    """The feed-forward branch: d to mlp_ratio · d to d with an activation between."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, hidden = config.embed_dim, int(config.embed_dim * config.mlp_ratio)
        self.bias_fc1, self.bias_act, self.bias_fc2 = (scalar_bias(config) for _ in range(3))
        self.fc1 = nn.Linear(d, hidden)
        self.act = nn.LeakyReLU() if config.act == "leaky_relu" else nn.GELU()
        self.fused = config.act == "gelu" and config.residual != "fixup"  # nothing between GELU and fc2
        self.fc2 = nn.Linear(hidden, d)

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        if self.fused:
            return scaled_linear(self.fc2, self.fc1(x), gamma, gelu=True)
        hidden = self.act(self.bias_act(self.fc1(self.bias_fc1(x))))
        return scaled_linear(self.fc2, self.bias_fc2(hidden), gamma)


class Block(nn.Module):
    """What both kinds of block are made of: two residual branches, attention and feed-forward."""

    def __init__(self, config: CaiTConfig, attn: nn.Module, drop_path_rate: float, scaled: bool = True) -> None:
        super().__init__()
        self.gamma_1 = residual_scale(config) if scaled else None
        self.gamma_2 = residual_scale(config) if scaled else None
        self.norm1 = norm_layer(config)
        self.attn = attn
        self.drop_path = DropPath(drop_path_rate, config.drop_path_mode if config.residual != "none" else "mask")
        self.norm2 = norm_layer(config)
        self.mlp = Mlp(config)
        self.skip = config.residual != "none"
        self.run: Callable[..., Tensor] = type(self).body
        """`body`, or its compiled form. It is given the block, so that a copy of a block runs its own weights."""

    def body(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def add(self, x: Tensor, kept: Kept, branch: Callable[..., Tensor], gamma: nn.Parameter | None) -> Tensor:
        """x + stochastic depth(branch(x, γ)), the branch for the images that `kept` names."""
        if kept is None:
            y = self.drop_path(branch(x, gamma))
            return x + y if self.skip else y
        index, factor = kept
        y = branch(x[index], factor if gamma is None else factor * gamma)
        return x.index_add(0, index, y.to(x.dtype))


class SelfAttentionBlock(Block):
    """x + λ₁ SA(norm(x)), then x + λ₂ FFN(norm(x)), on tokens [B, N, d]."""

    def __init__(self, config: CaiTConfig, drop_path_rate: float) -> None:
        super().__init__(config, SelfAttention(config), drop_path_rate)

    def forward(self, x: Tensor, *kept: Kept) -> Tensor:
        """`kept` is what stochastic depth keeps in the two branches; if it is not given, it is drawn here."""
        return self.run(self, x, *(kept or draw_kept([self.drop_path] * 2, x)))

    def body(self, x: Tensor, kept_1: Kept, kept_2: Kept) -> Tensor:
        x = self.add(x, kept_1, lambda x, gamma: self.attn(normed(self.norm1, x), gamma), self.gamma_1)
        return self.add(x, kept_2, lambda x, gamma: self.mlp(normed(self.norm2, x), gamma), self.gamma_2)


class ClassAttentionBlock(Block):
    """The same for the class tokens [B, T, d] alone: the patches are read, never written; no stochastic depth."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config, ClassAttention(config), 0.0, scaled=config.layer_scale_token_only)

    def forward(self, x: Tensor, cls: Tensor) -> Tensor:
        return self.run(self, x, cls)

    def body(self, x: Tensor, cls: Tensor) -> Tensor:
        z = torch.cat((cls, x), dim=1)  # [B, T + N, d]
        cls = self.add(cls, None, lambda _, gamma: self.attn(normed(self.norm1, z), gamma), self.gamma_1)
        return self.add(cls, None, lambda cls, gamma: self.mlp(normed(self.norm2, cls), gamma), self.gamma_2)


def compiled(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's `body` compiled for any number of images.

    From the first call on, not from the first change, as torch would have it: a kernel for one size may
    round otherwise than that for all, and a resumed run would begin with the former.
    """
    fast = torch.compile(body, fullgraph=True)

    def run(block: Block, *args: Any) -> Tensor:
        for arg in args:
            if arg is not None:
                torch._dynamo.maybe_mark_dynamic(arg[0] if isinstance(arg, tuple) else arg, 0)
        return fast(block, *args)

    return run


class CaiT(nn.Module):
    """Class-attention in image Transformers: images [B, in_chans, img_size, img_size] to logits [B, num_classes]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        """Whether the activations of self-attention blocks are computed again in the backward pass, not kept."""
        d = config.embed_dim
        if config.global_pool == "token":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        if config.distillation_token:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, d))
        # A class token that is there from the first block on has a position too, as in DeiT.
        positions = config.num_patches + (config.num_class_tokens if config.class_token_at == 0 else 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, d))
        self.patch_embed = PatchEmbed(config.in_chans, config.patch_size, d)
        self.blocks = nn.Sequential(*(SelfAttentionBlock(config, rate) for rate in drop_path_rates(config)))
        self.blocks_token_only = nn.ModuleList(ClassAttentionBlock(config) for _ in range(config.depth_token_only))
        self.norm = norm_layer(config)
        self.head = nn.Linear(d, config.num_classes)
        if config.distillation_token:
            self.head_dist = nn.Linear(d, config.num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        """Linear weights, positions and class tokens from a normal of std .02 cut at ±2, biases 0.

        The patch projection keeps PyTorch's default, as in the released code.
        """
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.config.global_pool == "token":
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        if self.config.distillation_token:
            nn.init.trunc_normal_(self.dist_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        blocks = [*self.blocks, *self.blocks_token_only]
        if self.config.residual == "fixup":
            init_fixup(blocks, [self.head, self.head_dist] if self.config.distillation_token else [self.head])
        elif self.config.residual == "t-fixup":
            init_t_fixup(blocks)

    def compile_blocks(self) -> None:
        """Compile the blocks with torch.compile: each kind once for all its blocks, whatever the batch size.

        What stochastic depth draws stays outside, so that the number of images that it keeps is no
        cause for a graph break or a recompilation.

        Raises:
            UserError: there is no C++ compiler, which torch.compile needs on the CPU and beside a GPU.
        """
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError("torch.compile needs a C++ compiler: install g++, or leave `compile` off") from error
        for kind in (SelfAttentionBlock, ClassAttentionBlock):
            run = compiled(kind.body)
            for block in self.modules():
                if isinstance(block, kind):
                    block.run = run

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of two and more dimensions that are not decayed."""
        return {"pos_embed", "cls_token", "dist_token"}

    def class_tokens(self) -> Tensor:
        """The class token and the distillation token where there is one, [1, T, d]."""
        if not self.config.distillation_token:
            return self.cls_token
        return torch.cat((self.cls_token, self.dist_token), dim=1)

    def draw_kept(self, x: Tensor) -> list[tuple[Kept, ...]]:
        """What stochastic depth keeps of the images in each block, drawn at once for all blocks in training."""
        if not self.training:
            return [()] * len(self.blocks)
        drop_paths: list[Any] = [block.drop_path for block in self.blocks]
        both = draw_kept([drop_path for drop_path in drop_paths for _ in range(2)], x)
        return list(zip(both[::2], both[1::2], strict=True))

    def prepend_class_tokens(self, x: Tensor) -> Tensor:
        """[B, N, d] to [B, T + N, d]"""
        return torch.cat((self.class_tokens().expand(x.shape[0], -1, -1), x), dim=1)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm: [B, T + N, d] with the class tokens first, [B, N, d] without one."""
        size = self.config.img_size
        if images.shape[-2:] != (size, size):
            raise UserError(f"the model takes {size}×{size} pixels, got {images.shape[-2]}×{images.shape[-1]}")
        x = self.patch_embed(images)
        if self.config.class_token_at == 0:
            x = self.prepend_class_tokens(x)
        x = x + self.pos_embed
        kept = self.draw_kept(x)
        for i, block in enumerate(self.blocks):
            if i > 0 and i == self.config.class_token_at:
                x = self.prepend_class_tokens(x)
            if self.grad_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, *kept[i], use_reentrant=False)
            else:
                x = block(x, *kept[i])
        if self.config.global_pool == "avg":
            return normed(self.norm, x)
        if self.config.class_token_at is None:
            cls = self.class_tokens().repeat(x.shape[0], 1, 1)
        else:
            T = self.config.num_class_tokens
            cls, x = x[:, :T], x[:, T:]
        for block in self.blocks_token_only:
            cls = block(x, cls)
        return normed(self.norm, torch.cat((cls, x), dim=1))

    def forward_heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes] of each head: of the class, and of the distillation token where there is one."""
        tokens = self.forward_features(images)
        logits = self.head(tokens.mean(dim=1) if self.config.global_pool == "avg" else tokens[:, 0])
        return (logits, self.head_dist(tokens[:, 1])) if self.config.distillation_token else (logits,)

    def forward(self, images: Tensor) -> Tensor:
        """The prediction: with a distillation token the mean of both heads' logits, as in DeiT."""
        logits, *distilled = self.forward_heads(images)
        return (logits + distilled[0]) / 2 if distilled else logits


def create_model(
    name: str,
    img_size: int = 224,
    num_classes: int = 1000,
    drop_path_rate: float | None = None,
    *,
    pretrained: bool = False,
    **fields: Any,
) -> CaiT:
    """Build one of the paper's models, with fresh weights or timm's published ones.

    Args:
        name: a row of `cait.model.config.VARIANTS`: xxs24, xxs36, xs24, xs36, s24, s36, s48, m24, m36, m48.
        img_size: side of the square input in pixels, a multiple of the patch size.
        num_classes: width of the head.
        drop_path_rate: stochastic depth; None takes the paper's rate for this model.
        pretrained: load timm's weights of this model from the Hugging Face hub; see
            `cait.model.weights.load_pretrained`.
        fields: any other field of `cait.model.config.CaiTConfig`.

    Raises:
        UserError: unknown name or field, sizes that do not fit together, or weights that cannot be had.
    """
    config = variant_config(name, img_size=img_size, num_classes=num_classes, drop_path_rate=drop_path_rate, **fields)
    model = CaiT(config)
    if pretrained:
        load_pretrained(model, name)
    return model

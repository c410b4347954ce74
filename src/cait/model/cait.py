"""The whole network, top to bottom.

Parameter names, order and shapes are those of timm's `cait_*` and of the released weights, so either loads
as it is. Shapes: B images, C channels, S = img_size, N patches, d = embed_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cait import plugins, references
from cait.errors import UserError
from cait.model.attention import ClassAttention, SelfAttention, backend_named
from cait.model.config import CaiTConfig, variant_config
from cait.model.residual import (
    DropPath,
    Sample,
    draw_samples,
    gelu_linear,
    sampled,
    sampled_scale,
    scaled_linear,
)


def build(name: str, **fields: Any) -> CaiT:
    """One of the paper's ten models, xxs24 to m48, with fresh weights; see `cait.model.network.create_model`.

    Raises UserError for an unknown field or sizes that do not fit.
    """
    config = variant_config(name, **fields)
    return references.locate(config.network)(config)


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each: [B, C, S, S] to [B, N, d]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            config.in_chans, config.embed_dim, config.patch_size, stride=config.patch_size
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()


class Mlp(nn.Module):
    """The feed-forward branch, for each token alone: d to mlp_ratio · d, GELU, and back to d."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d = config.embed_dim
        hidden = int(d * config.mlp_ratio)
        self.fc1 = nn.Linear(d, hidden)
        self.fc2 = nn.Linear(hidden, d)
        self.gelu_linear = getattr(backend_named("default"), "gelu_linear", gelu_linear)

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · mlp(x) for x [B, N, d] and γ [d]; no γ means 1."""
        return scaled_linear(self.fc2, self.fc1(x), gamma, self.gelu_linear)


class Block(nn.Module):
    """The base of both kinds of block: two residual branches, attention and feed-forward, each with its γ."""

    def __init__(self, config: CaiTConfig, attn: nn.Module, drop_path_rate: float) -> None:
        super().__init__()
        self.gamma_1 = self.layer_scale(config)
        self.gamma_2 = self.layer_scale(config)
        self.norm1 = layer_norm(config)
        self.attn = attn
        self.drop_path = DropPath(drop_path_rate, config.drop_path_mode)
        self.norm2 = layer_norm(config)
        self.mlp: nn.Module = Mlp(config)
        self.run: Callable[..., Tensor] = type(self).body
        """`body`, or its compiled form. It takes the block as an argument, so a copied block runs its own weights."""

    def layer_scale(self, config: CaiTConfig) -> nn.Parameter | None:
        """γ of a branch at its start, [d] at ε."""
        return nn.Parameter(torch.full((config.embed_dim,), config.epsilon))

    def body(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def add(self, x: Tensor, y: Tensor, sample: Sample = None) -> Tensor:
        """x + drop_path(y), for x and y [B, N, d]; with a sample y is [kept, N, d], and scaled already."""
        return x + self.drop_path(y) if sample is None else x.index_add(0, sample[0], y.to(x.dtype))


def layer_norm(config: CaiTConfig) -> nn.Module:
    return nn.LayerNorm(config.embed_dim, eps=1e-6)


class SelfAttentionBlock(Block):
    """x + drop_path(γ₁ · attention(norm(x))), then x + drop_path(γ₂ · mlp(norm(x))), on tokens x [B, N, d]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config, SelfAttention(config), config.drop_path_rate)

    def forward(self, x: Tensor, *samples: Sample) -> Tensor:
        """`samples` are the draws of stochastic depth for the two branches; if not given, they are drawn here."""
        return self.run(self, x, *(samples or draw_samples([self.drop_path] * 2, x)))

    def body(self, x: Tensor, sample_1: Sample, sample_2: Sample) -> Tensor:
        gamma_1 = sampled_scale(self.gamma_1, sample_1)
        gamma_2 = sampled_scale(self.gamma_2, sample_2)
        x = self.add(x, self.attn(self.norm1(sampled(x, sample_1)), gamma_1), sample_1)
        return self.add(x, self.mlp(self.norm2(sampled(x, sample_2)), gamma_2), sample_2)


class ClassAttentionBlock(Block):
    """cls + γ₁ · attention(norm([cls, x])), then cls + γ₂ · mlp(norm(cls)), on the class token [B, 1, d].

    The patches x [B, N, d] are read, never written. There is no stochastic depth.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config, ClassAttention(config), drop_path_rate=0.0)

    def forward(self, x: Tensor, cls: Tensor) -> Tensor:
        return self.run(self, x, cls)

    def body(self, x: Tensor, cls: Tensor) -> Tensor:
        cls = self.add(cls, self.attn(self.norm1(torch.cat((cls, x), dim=1)), self.gamma_1))
        return self.add(cls, self.mlp(self.norm2(cls), self.gamma_2))


def compiled(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's `body`, compiled for any number of images from the first call on, so that a resumed run has its bits.

    torch compiles anew for one image, for an offset in a tensor and for a tensor given twice, and gives up after 8
    times: samples get tensors of their own.
    """
    fast = torch.compile(body, fullgraph=True)

    def prepare(arg: Any) -> Any:
        if isinstance(arg, tuple):  # a sample
            arg = arg[0].clone(), arg[1].detach()
            torch._dynamo.maybe_mark_dynamic(arg[0], 0)
        elif arg is not None:
            torch._dynamo.maybe_mark_dynamic(arg, 0)
        return arg

    return lambda block, *args: fast(block, *map(prepare, args))


class CaiT(*plugins.groups("network"), nn.Module):  # type: ignore[misc]
    """Class-attention in image Transformers: images [B, C, S, S] to logits [B, num_classes]."""

    blocks_of: tuple[Callable[..., nn.Module], ...] = (SelfAttentionBlock, ClassAttentionBlock)
    """What makes its blocks."""
    global_pool = "token"
    """The head reads the class token ("token"), the mean of the patches ("avg"), or all tokens ("")."""
    num_prefix_tokens = 1

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        """Compute the activations of self-attention blocks again in the backward pass instead of saving them."""
        d = config.embed_dim
        block, class_block = self.blocks_of
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches, d))
        self.patch_embed = references.locate(config.patches)(config)
        self.blocks = nn.Sequential(*(block(config) for _ in range(config.depth)))
        self.blocks_token_only = nn.ModuleList(
            class_block(config) for _ in range(config.depth_token_only)
        )
        self.norm = layer_norm(config)
        self.head: Any = nn.Linear(d, config.num_classes)
        self.draw_weights()

    def draw_weights(self) -> None:
        """Draw linear weights, positions and class token from a normal of std .02 cut at ±2; set biases to 0."""
        for parameter in reversed([*self.parameters(recurse=False)]):  # the positions come first
            nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            # the patch projection keeps PyTorch's default, as in the released code
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, S, S] to logits [B, num_classes]."""
        return self.forward_head(self.forward_features(images))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """All tokens [B, 1 + N, d] to logits [B, num_classes], or to what the head reads."""
        if self.global_pool:
            x = x[:, self.num_prefix_tokens :].mean(dim=1) if self.global_pool == "avg" else x[:, 0]
        return x if pre_logits else self.head(x)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, [B, 1 + N, d]. The class token comes first."""
        return self.forward_class(self.forward_blocks(self.embed(images) + self.pos_embed))

    def forward_class(self, x: Tensor) -> Tensor:
        """The blocks of class attention and the last norm: [B, N, d] to [B, 1 + N, d]."""
        cls = self.cls_token.repeat(x.shape[0], 1, 1)
        for block in self.blocks_token_only:
            cls = block(x, cls)
        return self.norm(torch.cat((cls, x), dim=1))

    def embed(self, images: Tensor) -> Tensor:
        """[B, C, S, S] to [B, N, d]. Raises UserError for images of another size."""
        size = self.config.img_size
        if images.shape[-2:] != (size, size):
            raise UserError(
                f"the model takes {size}×{size} pixels, got {images.shape[-2]}×{images.shape[-1]}"
            )
        return self.patch_embed(images)

    def forward_blocks(self, x: Tensor) -> Tensor:
        """The blocks of self-attention: [B, N, d] to the same shape."""
        drops: list[Any] = [block.drop_path for block in self.blocks for _ in range(2)]
        drawn = draw_samples(drops, x)  # for all at once: the indices travel in one copy
        for block, *samples in zip(self.blocks, drawn[::2], drawn[1::2], strict=True):
            x = self.run_block(block, x, *samples)
        return x

    def run_block(self, block: nn.Module, x: Tensor, *samples: Sample) -> Tensor:
        """A block of self-attention: [B, N, d] to the same shape."""
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, x, *samples, use_reentrant=False)
        return block(x, *samples)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, S, S) of an image."""
        return self.config.in_chans, self.config.img_size, self.config.img_size

    def compile_blocks(self) -> None:
        """Compile each kind of block once for all its blocks. It needs a C++ compiler, on the CPU and beside a GPU."""
        blocks: list[Any] = [*self.blocks, *self.blocks_token_only]
        runs = {type(block): compiled(type(block).body) for block in blocks}
        for block in blocks:
            block.run = runs[type(block)]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of two or more dimensions that are not decayed."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Depth of a parameter by its name, for layer-wise learning rates, as in timm's CaiT."""
        from timm.models.cait import Cait

        return Cait.group_matcher(self, coarse)

    def fit_weights(self, state: dict[str, Tensor]) -> list[str]:
        """Resize the positions [1, N, d] in weights of another resolution, in place; a line if that was done.

        Bicubic without antialiasing, as the released code did. Raises UserError if they form no square grid.
        """
        from timm.layers import resample_abs_pos_embed

        before = state.get("pos_embed")
        after = self.pos_embed
        patches = self.config.num_patches
        if before is None or after.shape[1] != patches or before.shape[2:] != after.shape[2:]:
            return []  # of another width it is another network, which the caller finds out
        count = before.shape[1]
        if count == patches:
            return []
        if math.isqrt(count) ** 2 != count:
            raise UserError(
                f"positions can be resized between square grids, not {count} to {patches}"
            )
        side = math.isqrt(patches)
        state["pos_embed"] = resample_abs_pos_embed(
            before, [side, side], num_prefix_tokens=0, antialias=False
        )
        return [f"positions resized from {count} to {patches} patches"]

"""The whole network, top to bottom.

Parameter names, order and shapes are those of timm's `cait_*` and of the released weights, so either loads
as it is. Shapes: B images, N patches, d = embed_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from cait.errors import UserError
from cait.model import residual
from cait.model.attention import ClassAttention, SelfAttention
from cait.model.config import CaiTConfig
from cait.model.residual import Sample, scalar_bias, scaled_linear


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each: the paper's stem."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_chans, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()


class ConvStem(nn.Module):
    """3×3 convolutions that halve the sides, then a projection to d channels. It is not the CaiT paper's.

    It is that of "Early Convolutions Help Transformers See Better", Xiao et al., arXiv 2106.14881. patch_size is
    2^k · f with f odd. There are k convolutions, whose channels double up to d, and the projection is f×f with stride
    f: 1×1 for a power of two, as in their paper. An odd patch_size has one convolution of d / 4 channels, which keeps
    the sides. Batch norm and ReLU follow each convolution.

    The stem "pooled" convolves with stride 1 from the second on, with at least d / 4 channels, and halves by pooling.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        pools = config.stem == "pooled"
        d, factor, halvings = config.embed_dim, config.patch_size, 0
        while factor % 2 == 0:
            factor, halvings = factor // 2, halvings + 1
        layers, channels = list[nn.Module](), config.in_chans
        for above in reversed(range(halvings)) if halvings else [2]:
            is_pooled = pools and bool(layers)
            width = max(1, d // 2 ** (min(above, 2) if pools else above))
            stride = 2 if halvings and not is_pooled else 1
            layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if is_pooled:
                layers.append(nn.MaxPool2d(2))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, d, factor, stride=factor)

    def forward(self, images: Tensor) -> Tensor:
        # With the channels last, convolutions are faster on a CPU, and the tokens need no copy.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.project(self.layers(images)).flatten(2).transpose(1, 2).contiguous()


def norm_layer(config: CaiTConfig) -> nn.Module:
    return nn.BatchNorm1d(config.embed_dim) if config.norm == "batchnorm" else nn.LayerNorm(config.embed_dim, eps=1e-6)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` over the channels of tokens [B, N, d]. A batch norm, SyncBatchNorm included, takes [B, d, N]."""
    return norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(norm, _BatchNorm) else norm(x)


class Mlp(nn.Module):
    """The feed-forward branch: d to mlp_ratio · d to d with an activation between."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        d, hidden = config.embed_dim, int(config.embed_dim * config.mlp_ratio)
        self.bias_fc1, self.bias_act, self.bias_fc2 = (scalar_bias(config) for _ in range(3))
        self.fc1 = nn.Linear(d, hidden)
        self.act = nn.LeakyReLU() if config.act == "leaky_relu" else nn.GELU()
        self.gelu_in_fc2 = config.act == "gelu" and config.residual != "fixup"  # nothing stands between the two
        self.fc2 = nn.Linear(hidden, d)

    def forward(self, x: Tensor, gamma: Tensor | None = None) -> Tensor:
        """γ · mlp(x); no γ means 1."""
        if self.gelu_in_fc2:
            return scaled_linear(self.fc2, self.fc1(x), gamma, gelu=True)
        hidden = self.act(self.bias_act(self.fc1(self.bias_fc1(x))))
        return scaled_linear(self.fc2, self.bias_fc2(hidden), gamma)


class Block(nn.Module):
    """The base of both kinds of block: two residual branches, attention and feed-forward."""

    def __init__(self, config: CaiTConfig, attn: nn.Module, drop_path_rate: float, scaled: bool = True) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = (residual.residual_scale(config) if scaled else None for _ in range(2))
        self.norm1 = norm_layer(config)
        self.attn = attn
        self.skip = config.residual != "none"
        self.drop_path = residual.DropPath(drop_path_rate, config.drop_path_mode if self.skip else "mask")
        self.norm2 = norm_layer(config)
        self.mlp = Mlp(config)
        self.run: Callable[..., Tensor] = type(self).body
        """`body`, or its compiled form. It takes the block as an argument, so a copied block runs its own weights."""

    def body(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def add(self, x: Tensor, y: Tensor, sample: Sample = None) -> Tensor:
        """x + drop_path(y). With a sample, y [images in the sample, ...] is scaled already."""
        if sample is not None:
            return x.index_add(0, sample[0], y.to(x.dtype))
        y = self.drop_path(y)
        return x + y if self.skip else y


class SelfAttentionBlock(Block):
    """x + drop_path(γ₁ · attention(norm(x))), then x + drop_path(γ₂ · mlp(norm(x))), on tokens [B, N, d]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config, SelfAttention(config), config.drop_path_rate)

    def forward(self, x: Tensor, *samples: Sample) -> Tensor:
        """`samples` are the draws of stochastic depth for the two branches; if not given, they are drawn here."""
        return self.run(self, x, *(samples or residual.draw_samples([self.drop_path] * 2, x)))

    def body(self, x: Tensor, sample_1: Sample, sample_2: Sample) -> Tensor:
        gamma_1 = residual.sampled_scale(self.gamma_1, sample_1)
        gamma_2 = residual.sampled_scale(self.gamma_2, sample_2)
        x = self.add(x, self.attn(normed(self.norm1, residual.sampled(x, sample_1)), gamma_1), sample_1)
        return self.add(x, self.mlp(normed(self.norm2, residual.sampled(x, sample_2)), gamma_2), sample_2)


class ClassAttentionBlock(Block):
    """cls + γ₁ · attention(norm([cls, x])), then cls + γ₂ · mlp(norm(cls)), on the class token [B, 1, d].

    The patches x [B, N, d] are read, never written. There is no stochastic depth.
    """

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__(config, ClassAttention(config), 0.0, scaled=config.layer_scale_token_only)

    def forward(self, x: Tensor, cls: Tensor) -> Tensor:
        return self.run(self, x, cls)

    def body(self, x: Tensor, cls: Tensor) -> Tensor:
        tokens = torch.cat((cls, x), dim=1)  # [B, 1 + N, d]
        cls = self.add(cls, self.attn(normed(self.norm1, tokens), self.gamma_1))
        return self.add(cls, self.mlp(normed(self.norm2, cls), self.gamma_2))


def compiled(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's `body`, compiled for any number of images from the first call on, and for each number of tokens.

    torch compiles the first call for its size: a resumed run, which starts with another, would end with other bits. It
    compiles anew for a size of 1, a slice's offset of 0 or 1 and a tensor given twice, until it gives up. So samples
    get tensors of their own, and a lone image counts twice with half the factor: a batch norm's variance is smaller.
    """
    fast = torch.compile(body, fullgraph=True)

    def own(arg: Any) -> Any:
        if isinstance(arg, tuple):
            indices, factor = arg
            arg = (indices.repeat(2), factor / 2) if len(indices) == 1 else (indices.clone(), factor.detach())
            torch._dynamo.maybe_mark_dynamic(arg[0], 0)
        elif arg is not None:
            torch._dynamo.maybe_mark_dynamic(arg, 0)
            torch._dynamo.mark_static(arg, 1)  # attention is chosen by the number of tokens
        return arg

    return lambda block, *args: fast(block, *map(own, args))


class Maps(NamedTuple):
    """Attention maps of a batch, a tensor for each block: the weights that a query (row) gives the values."""

    self_attention: list[Tensor]
    """[B, h, N, N] each, mixed over the heads."""
    class_attention: list[Tensor]
    """[B, h, 1, 1 + N] each, the class token first; [B, h, 1, N] with `cls_in_keys` off."""


class CaiT(nn.Module):
    """Class-attention in image Transformers: images [B, in_chans, img_size, img_size] to logits [B, num_classes]."""

    def __init__(self, config: CaiTConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        """Compute the activations of self-attention blocks again in the backward pass instead of saving them."""
        d = config.embed_dim
        if config.global_pool == "token":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        # A class token that is there from the first block on has a position too, as in DeiT.
        positions = config.num_patches + (config.class_token_at == 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, d))
        self.patch_embed = PatchEmbed(config) if config.stem == "patch" else ConvStem(config)
        self.blocks = nn.Sequential(*(SelfAttentionBlock(config) for _ in range(config.depth)))
        self.blocks_token_only = nn.ModuleList(ClassAttentionBlock(config) for _ in range(config.depth_token_only))
        self.norm = norm_layer(config)
        self.head = nn.Linear(d, config.num_classes)
        residual.draw_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits [B, num_classes]."""
        tokens = self.forward_features(images)
        return self.head(tokens.mean(dim=1) if self.config.global_pool == "avg" else tokens[:, 0])

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm: [B, 1 + N, d] with the class token first, [B, N, d] without one."""
        size = self.config.img_size
        if images.shape[-2:] != (size, size):
            raise UserError(f"the model takes {size}×{size} pixels, got {images.shape[-2]}×{images.shape[-1]}")
        x = self.patch_embed(images)
        if self.config.class_token_at == 0:
            x = self.prepend_class_token(x)
        x = x + self.pos_embed
        drawn: list[Sample] = []
        if self.training:  # for all blocks at once: the indices travel in one copy
            drops: list[Any] = [block.drop_path for block in self.blocks for _ in range(2)]
            drawn = residual.draw_samples(drops, x)
        for i, block in enumerate(self.blocks):
            if i > 0 and i == self.config.class_token_at:
                x = self.prepend_class_token(x)
            samples = drawn[2 * i : 2 * i + 2]
            if self.grad_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, *samples, use_reentrant=False)
            else:
                x = block(x, *samples)
        if self.config.global_pool == "avg":
            return normed(self.norm, x)
        if self.config.class_token_at is None:
            cls = self.cls_token.repeat(x.shape[0], 1, 1)
        else:
            cls, x = x[:, :1], x[:, 1:]
        for block in self.blocks_token_only:
            cls = block(x, cls)
        return normed(self.norm, torch.cat((cls, x), dim=1))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, S, S) of an image."""
        return self.config.in_chans, self.config.img_size, self.config.img_size

    def prepend_class_token(self, x: Tensor) -> Tensor:
        """[B, N, d] to [B, 1 + N, d]"""
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)

    @torch.no_grad()
    def maps(self, images: Tensor) -> Maps:
        """The attention maps of images [B, in_chans, img_size, img_size], as in evaluation; not of compiled blocks."""
        found = Maps([], [])
        blocks: list[Any] = [*self.blocks, *self.blocks_token_only]

        def look(attn: Any, arguments: tuple[Tensor, ...]) -> None:
            maps = found.self_attention if isinstance(attn, SelfAttention) else found.class_attention
            maps.append(attn.maps(arguments[0]))

        hooks = [block.attn.register_forward_pre_hook(look) for block in blocks]
        try:
            with in_evaluation(self):
                self(images)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def compile_blocks(self) -> None:
        """Compile the blocks with torch.compile: each kind once for all its blocks, all batch sizes and all draws.

        torch.compile needs a C++ compiler, on the CPU and beside a GPU.
        """
        for kind in (SelfAttentionBlock, ClassAttentionBlock):
            run = compiled(kind.body)
            for block in self.modules():
                if isinstance(block, kind):
                    block.run = run

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of two or more dimensions that are not decayed."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Depth of a parameter by its name, for layer-wise learning rates, as in timm's CaiT."""

        def depth(name: str) -> float:
            if name.startswith(("cls_token", "pos_embed", "patch_embed")):
                return 0
            kind, _, rest = name.partition(".")
            if kind == "blocks":
                return int(rest.split(".")[0]) + 1
            if kind == "blocks_token_only":
                return int(rest.split(".")[0]) + len(self.blocks) - len(self.blocks_token_only) + 1
            return len(self.blocks) if kind == "norm" else float("inf")

        return depth

    def get_classifier(self) -> nn.Linear:
        """The layer whose rows are the classes."""
        return self.head


@contextmanager
def in_evaluation(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation, and then each part back into the mode that it had: some may train, others not."""
    modes = [(part, part.training) for part in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training

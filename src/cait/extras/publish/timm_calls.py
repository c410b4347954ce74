"""What code that is written for timm's networks calls on one, for CaiT: each as on timm's own.

Shapes: B images, C channels, S = img_size, N patches, d = embed_dim.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from cait.errors import UserError


class TimmCalls:
    """A base of `cait.model.cait.CaiT`."""

    @property
    def num_features(self: Any) -> int:
        """d; `embed_dim` and `head_hidden_size` are timm's other names of it."""
        return self.config.embed_dim

    embed_dim = head_hidden_size = num_features

    @property
    def num_classes(self: Any) -> int:
        """The rows of the head, 0 without one."""
        return getattr(self.head, "out_features", 0)

    @property
    def feature_info(self: Any) -> list[dict[str, Any]]:
        """Channels, stride and name of each block of self-attention."""
        sizes = dict(num_chs=self.config.embed_dim, reduction=self.config.patch_size)
        return [{**sizes, "module": f"blocks.{i}"} for i in range(len(self.blocks))]

    def get_classifier(self: Any) -> nn.Module:
        """The layer whose rows are the classes."""
        return self.head

    def reset_classifier(self: Any, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one, by none for 0 classes; `global_pool` changes what it reads, if given."""
        if global_pool not in (None, "", "avg", "token"):
            raise UserError(
                f"global_pool must be token, avg or '' for all tokens, got {global_pool!r}"
            )
        if global_pool is not None:
            self.global_pool = global_pool
        if num_classes:
            self.config = dataclasses.replace(self.config, num_classes=num_classes)
        like = dict(device=self.pos_embed.device, dtype=self.pos_embed.dtype)
        head = (
            nn.Linear(self.config.embed_dim, num_classes, **like) if num_classes else nn.Identity()
        )
        self.head = head.train(self.training)

    def prune_intermediate_layers(
        self: Any,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove what `forward_intermediates` of these indices does without; returns them, counted from 0."""
        from timm.models._features import feature_take_indices

        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:  # the class token stays: it may be among the patches from the first block on
            self.blocks_token_only = nn.ModuleList()
            self.reset_classifier(0, "")
        return taken

    def set_grad_checkpointing(self: Any, enable: bool = True) -> None:
        """Compute the activations of self-attention blocks again in the backward pass instead of saving them."""
        self.grad_checkpointing = enable

    def forward_intermediates(
        self: Any,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The patches after chosen blocks of self-attention, of images x [B, C, S, S].

        Args:
            indices: of the blocks, or how many of the last; None means all.
            norm: put them through the last norm.
            stop_early: leave out the blocks after the last that is chosen.
            output_fmt: "NCHW" for [B, d, √N, √N], "NLC" for [B, N, d].
            intermediates_only: return only them, and not also all tokens [B, 1 + N, d] after the last norm.
        """
        from timm.models._features import feature_take_indices

        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        count = self.config.num_patches
        side = math.isqrt(count)
        taken, last = feature_take_indices(len(self.blocks), indices)
        tokens = self.embed(x) + self.pos_embed
        maps: list[Tensor] = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            tokens = self.run_block(block, tokens)
            if i in taken:
                maps.append((self.norm(tokens) if norm else tokens)[:, -count:])
        if output_fmt == "NCHW":
            maps = [
                patches.transpose(1, 2).unflatten(2, (side, side)).contiguous() for patches in maps
            ]
        return maps if intermediates_only else (self.forward_class(tokens), maps)

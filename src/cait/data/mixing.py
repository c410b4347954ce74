"""Mixup and CutMix of a training batch, as timm does them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from timm.data import Mixup
from torch import Tensor

from cait.data.transforms import check_probability
from cait.errors import UserError

MixMode = Literal["batch", "pair", "elem"]


@dataclass(frozen=True)
class Mixing:
    """Settings of `cait.data.datamodule.ImageNetDataModule`, checked, and the mixing that they make.

    Raises:
        UserError: a setting is out of range.
    """

    mixup: float
    cutmix: float
    mix_prob: float
    mix_switch_prob: float
    mix_mode: MixMode

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.mix_mode not in get_args(MixMode):
            raise UserError(f"mix_mode must be one of {', '.join(get_args(MixMode))}, got {self.mix_mode!r}")
        for name in ("mix_prob", "mix_switch_prob"):
            check_probability(name, getattr(self, name))

    @property
    def is_on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mix [B, 3, S, S] and labels [B] into images of the same shape and probabilities [B, num_classes].

        Label smoothing is left to the loss. It is linear, so smoothing mixed labels gives what timm gets by
        mixing smoothed ones.
        """
        np.random.seed(seed)  # timm draws from numpy's global generator
        mixup = Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.mix_prob,
            switch_prob=self.mix_switch_prob,
            mode=self.mix_mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )
        return mixup(images, labels)

"""Train the head, or the last blocks, on features that are already there: --model.freeze, --model.head_lr_factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cait.errors import UserError

MODEL_SETTINGS = "cait.extras.freeze:FreezeSettings"


@dataclass(frozen=True)
class FreezeSettings:
    """What keeps the weights that training starts from, and how fast the head learns.

    Raises:
        UserError: a setting is out of range.
    """

    freeze: bool | int = False
    """True trains the head alone. N keeps the patch embedding, the positions and the first N blocks as they are: of
    CaiT blocks of self-attention, of timm's networks the stages of `group_matcher(coarse=True)`. What is frozen
    computes as in evaluation, without stochastic depth, and its BatchNorm statistics stay."""
    head_lr_factor: float | None = None
    """The rate of the head is the others' times this factor; with `layer_decay` too. None means 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.freeze, bool) and self.freeze < 1:
            raise UserError(f"freeze must be true, false or a number of blocks from 1 on, got {self.freeze}")
        if self.head_lr_factor is not None and not self.head_lr_factor > 0:
            raise UserError(f"head_lr_factor must be above 0 or null, got {self.head_lr_factor}")


def step_callbacks(data: Any) -> list[Any]:
    """What freezes the network when a run asks for it."""
    from cait.extras.freeze.callback import Freeze

    return [Freeze()]


def parameter_groups(optimizer: Any, network: Any) -> None:
    """Give the head groups of its own if it has a rate of its own."""
    if (factor := getattr(network, "head_lr_factor", None)) is not None:
        from cait.extras.freeze.parts import scale_head

        scale_head(optimizer, network, factor)

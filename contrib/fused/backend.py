"""The backend "fused"."""

from __future__ import annotations

import torch
from torch import Tensor

from cait.model.talking_heads import Shape


class Fused:
    """See `cait.model.talking_heads.Backend`. Triton is imported on first use, because not every machine has it."""

    def refusal(self, shape: Shape) -> str | None:
        """What the kernels need and do not have here, or None."""
        try:
            from contrib.fused import attention
        except ImportError as error:
            return f"Triton ({error})"
        return attention.refusal(torch.device(shape.device), shape.dtype, shape.heads)

    def __call__(
        self, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        from contrib.fused import attention

        return attention.talking_heads(qkv, weight_l, bias_l, weight_w, bias_w, scale)[0]

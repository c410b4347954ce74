"""The backend "fused": where it runs, whether it is right there, and whether it is the fastest."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Literal

import torch
from torch import Tensor

FASTEST: dict[tuple[int, int] | None, Literal["fused", "recompute"]] = {}
"""The fastest backend by compute capability, as measured by `benchmarks/kernel.py`. Nothing is measured yet.

Without a row "auto" takes "fused" on a GPU, because it moves half the bytes.
"""


class Fused:
    """See `cait.model.talking_heads.Backend`. Triton is imported on first use, because not every machine has it."""

    def refusal(self, device: torch.device, dtype: torch.dtype, heads: int) -> str | None:
        """What the kernels need and do not have here, or None."""
        try:
            from cait.extras.fused import attention
        except ImportError as error:
            return f"Triton ({error})"
        return attention.refusal(device, dtype, heads)

    def rank(self, device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> int:
        """2 where "fused" runs, is the fastest and is right, else 0."""
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return 0  # Triton takes long to import
        if self.refusal(device, dtype, heads):
            return 0
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if FASTEST.get(capability, "fused") != "fused":
            return 0
        return 2 * self.is_right(device, dtype, N, heads, k)

    def is_right(self, device: torch.device, dtype: torch.dtype, N: int, heads: int, k: int) -> bool:
        """Compare with the plain backend on one random image, and print or warn. It compiles, so it takes a second."""
        from cait.extras.fused import attention

        bound = max(4 * torch.finfo(dtype).eps, 1e-4)
        try:
            error = attention.difference(device, dtype, N, heads, k)
        except Exception as failure:  # no compiler, an old driver: train without it
            line = (str(failure).splitlines() or [""])[0]
            kind = type(failure).__name__
            warnings.warn(f"attention by recompute: fused failed its check ({kind}: {line})", stacklevel=2)
            return False
        if not error <= bound:  # NaN too
            warnings.warn(f"attention by recompute: fused differs by {error:.1e}, {bound:.1e} is allowed", stacklevel=2)
            return False
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shape = f"{heads} heads, {N} tokens"
            print(f"attention by fused, {shape}: differs by {error:.1e} from float64", file=sys.stderr, flush=True)
        return True

    def __call__(
        self, qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
    ) -> Tensor:
        from cait.extras.fused import attention

        return attention.talking_heads(qkv, weight_l, bias_l, weight_w, bias_w, scale)[0]

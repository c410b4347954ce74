"""The kernels in place of a network's attention. Triton is imported on first use: not every machine has it."""

from typing import Any

import torch
from torch import Tensor

from cait.errors import UserError


def fused(
    qkv: Tensor, weight_l: Tensor, bias_l: Tensor, weight_w: Tensor, bias_w: Tensor, scale: float
) -> Tensor:
    """qkv [B, N, 3, h, k], weights [h, h] and biases [h] to [B, N, h·k]. Raises UserError where it cannot run."""
    if reason := _refusal(qkv.device.type, qkv.dtype, qkv.shape[3]):
        raise UserError(f"the fused attention needs {reason}")
    from contrib.fused import attention

    return attention.talking_heads(qkv, weight_l, bias_l, weight_w, bias_w, scale)[0]


@torch.compiler.assume_constant_result  # torch.compile need not trace it
def _refusal(*case: Any) -> str | None:
    """What the kernels need for a type of device, a dtype and a number of heads, and do not have here; or None."""
    try:
        from contrib.fused import attention
    except ImportError as error:
        return f"Triton ({error})"
    device, dtype, heads = case
    return attention.refusal(torch.device(device), dtype, heads)

"""float32 on AMD processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WIDE = 64
"""oneDNN is slower than MKL on narrower networks (benchmarks/onednn.md)."""


@contextmanager
def fast_matmul(network: Any, device: torch.device) -> Iterator[None]:
    """Let oneDNN multiply float32 matrices inside, if that is faster than MKL.

    It is faster on an AMD processor with AVX-512, because MKL, PyTorch's choice, has AVX-512 for Intel's processors
    only. PyTorch hands float32 matrices to oneDNN where bfloat16 is permitted. oneDNN makes use of that permission with
    AMX instructions alone, which AMD's processors do not have. So float32 stays; its rounding errors are up to 1.5
    times those of MKL. A precision that you have set in `torch.backends` stays too.

    Args:
        network: at least 64 wide by its `pos_embed` [1, N, D]; others keep MKL.
        device: where it runs; nothing changes unless it is the CPU.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    table = positions(network)
    wide = table is not None and table.shape[-1] >= WIDE
    if device.type != "cpu" or not wide or not _onednn_is_faster() or matmul.fp32_precision != "none":
        yield
        return
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = "none"


def positions(network: Any) -> Tensor | None:
    """The table of a network's positions, [1, N, D]; None if it has no such table."""
    table = getattr(network, "pos_embed", None)
    return table if isinstance(table, Tensor) else None


def _onednn_is_faster() -> bool:
    processor = torch.cpu.get_capabilities()
    has_avx512 = all(processor.get(f"avx512_{part}") for part in ("f", "vl", "bw", "dq"))
    is_amd = "AMD" in processor.get("cpu_name", "") and not processor.get("amx_tile")
    return is_amd and has_avx512 and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()

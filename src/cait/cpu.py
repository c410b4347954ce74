"""float32 on AMD processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """Let oneDNN multiply float32 matrices inside, if `device` is a CPU where it is faster than MKL and as exact.

    MKL, PyTorch's choice, has AVX-512 for Intel's processors only: on others it takes about twice as long as oneDNN.
    PyTorch hands such matrices to oneDNN if the precision is "medium", which permits bfloat16. oneDNN makes use of that
    with AMX instructions alone, which AMD's processors do not have. A precision that has been set before stays.
    """
    if device.type != "cpu" or not _onednn_is_faster() or not _precision_is_default():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _onednn_is_faster() -> bool:
    processor = torch.cpu.get_capabilities()
    has_avx512 = all(processor.get(f"avx512_{part}") for part in ("f", "vl", "bw", "dq"))
    return "AMD" in processor.get("cpu_name", "") and has_avx512 and not processor.get("amx_tile")


def _precision_is_default() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by one of the newer settings in torch.backends
        return False

"""What the steps of a run spend their time on."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.profilers import PyTorchProfiler

WARM_UP = 3
"""Steps that are not recorded: the first ones start the workers, compile and choose kernels."""


class StepProfiler(PyTorchProfiler):
    """Lightning's profiler over some steps. The run's folder gets a table of operators and kernels, and a trace.

    Args:
        steps: number of recorded steps, after 3 others.
        row_limit: rows of the table.
    """

    def __init__(self, steps: int = 20, row_limit: int = 50) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it has much to say about a machine without a GPU
        schedule = torch.profiler.schedule(wait=1, warmup=WARM_UP - 1, active=steps, repeat=1)
        super().__init__(filename="profile", row_limit=row_limit, schedule=schedule)

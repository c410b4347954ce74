"""What torch reads from the environment when it is loaded."""

from __future__ import annotations

import os


def prepare() -> None:
    """Set what suits training, unless the user has set it."""
    # CPU threads that spin while they wait make a run five to twenty times slower if another job uses the same cores.
    # Alone they are up to 1.5 times faster: set OMP_WAIT_POLICY=ACTIVE if you know that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that ends breaks the others' connections. For each one torch would print a C++ stack trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Stochastic depth asks a GPU's memory for another size in each branch and step. Segments that grow leave no gaps.
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

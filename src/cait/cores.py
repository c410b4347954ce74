"""What a process takes of its machine: cores, and what torch reads when it is loaded."""

import gc
import os
import signal
import sys
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""The end of a scheduled job, Ctrl-C, the signal that SLURM is asked to send before the end, and a closed terminal.

A scheduler and a terminal send them to the whole group of processes.
"""


USUAL = gc.get_threshold()
IMPORTING = 100_000
"""How many new objects Python's collector waits for. Imports make a million that stay, at which it looks in vain."""


def after_imports() -> None:
    """Collect as usual again, if `before_torch` has changed it: what training leaves may hold much memory."""
    if gc.get_threshold()[0] == IMPORTING:
        gc.set_threshold(*USUAL)


def before_torch() -> None:
    """Set what torch reads from the environment when it is loaded, unless the user has set it."""
    if "torch" not in sys.modules:
        gc.set_threshold(IMPORTING)
    # CPU threads that spin while they wait make a run five to twenty times slower if another job uses the same cores.
    # Alone they are up to 1.5 times faster: set OMP_WAIT_POLICY=ACTIVE if you know that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that ends breaks the others' connections. For each one torch would print a C++ stack trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch asks the system for a batch's memory again and again, and its pages take longer than normalizing the images.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Stochastic depth asks a GPU's memory for another size in each branch and step. Segments that grow leave no gaps.
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    if names.isdisjoint(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def discard(stream: Any) -> None:
    """Send what is written to a stream from now on nowhere, and what it holds: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def share(processes: int) -> int:
    """Cores for each of the training processes on this node, at least 1.

    The processes share the cores that this one may use, unless SLURM has bound each to its own. A bound process
    has fewer cores than the job step, and gets at most an equal share of them.
    """
    # it knows affinity and a container's quota, and takes a fifth of a second to import
    from joblib import (
        cpu_count,
    )

    cores = cpu_count()
    step_cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    total = int(step_cores) if step_cores.isdecimal() else cores
    return max(1, min(cores, total // processes))

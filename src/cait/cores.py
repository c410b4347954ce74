"""How many cores a training process and its loader workers have, and what torch reads when it is loaded."""

from __future__ import annotations

import math
import os
from pathlib import Path

OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def before_torch() -> None:
    """Set what torch reads from the environment when it is loaded, unless the user has set it."""
    # CPU threads that spin while they wait make a run five to twenty times slower if another job uses the same cores.
    # Alone they are up to 1.5 times faster: set OMP_WAIT_POLICY=ACTIVE if you know that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that ends breaks the others' connections. For each one torch would print a C++ stack trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Stochastic depth asks a GPU's memory for another size in each branch and step. Segments that grow leave no gaps.
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def share(processes: int) -> int:
    """Cores for each of the training processes on this node, at least 1.

    The processes share the cores that this one may use, unless SLURM has bound each to its own. A bound process
    has fewer cores than the job step, and gets at most an equal share of them.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    of_step = os.environ.get("SLURM_CPUS_ON_NODE", "")
    together = min(int(of_step) if of_step.isdecimal() else bound, quota())
    return max(1, min(bound, int(together / processes)))


def quota() -> float:
    """Processor time that this process's control groups allow, in cores; inf without a limit."""
    groups = [line.removeprefix("0::/") for line in _read(OWN_GROUP).splitlines() if line.startswith("0::/")]
    folders = [folder for group in groups for folder in (GROUPS / group, *(GROUPS / group).parents)]
    limits = [_read(folder / "cpu.max") for folder in folders]
    limits.append(" ".join(_read(GROUPS / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")))  # version 1
    return min(map(_cores, limits))


def _cores(limit: str) -> float:
    time, period = limit.split() or ("max", "")
    return math.inf if time in ("max", "-1") else int(time) / int(period)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""

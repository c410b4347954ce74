"""What a process takes of its machine: cores, loader processes, and what torch reads when it is loaded."""

from __future__ import annotations

import atexit
import gc
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cait.errors import UserError, one_line

OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
STARTS = ("auto", "fork", "forkserver", "spawn")
"""How loader processes may start."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""The end of a scheduled job, Ctrl-C, the signal that SLURM is asked to send before the end, and a closed terminal.

A scheduler and a terminal send them to the whole group of processes.
"""
NUMBERS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "TORCHELASTIC_RESTART_COUNT")
"""Variables that must be whole numbers. The first four count as this process's as soon as Lightning is imported."""
SERVED = "cait.data.datamodule"
"""What the server that forks workers has imported, so that a worker starts in milliseconds."""


def before_torch() -> None:
    """Set what torch reads from the environment when it is loaded, unless the user has set it."""
    # CPU threads that spin while they wait make a run five to twenty times slower if another job uses the same cores.
    # Alone they are up to 1.5 times faster: set OMP_WAIT_POLICY=ACTIVE if you know that nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A process that ends breaks the others' connections. For each one torch would print a C++ stack trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch asks the system for a batch's memory again and again, and its pages take longer than normalising the images.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Stochastic depth asks a GPU's memory for another size in each branch and step. Segments that grow leave no gaps.
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def open_streams() -> None:
    """Open standard streams that are closed, so that no file of a run gets their number and what is printed there.

    Raises:
        UserError: standard output is closed.
    """
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, which is this one
        setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, "w" if number else "r", closefd=False))
    if 1 in closed:
        raise UserError("standard output is closed; send it to a file or to /dev/null")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def discard(stream: Any) -> None:
    """Send what is written to a stream from now on nowhere, and what it holds: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_numbers() -> None:
    """Raise UserError if a variable of `NUMBERS` is none."""
    for name in NUMBERS:
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UserError(f"the environment has {name}={value}, which is no whole number; unset it")


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and Lightning in three quarters of the time: without the garbage collector.

    They make half a million objects that stay. The collector would search them over and over, and touch them in each
    worker, which would then have copies.
    """
    if "torch" in sys.modules:  # in somebody's process: its objects need not stay
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # packages in C++ would report what stays as leaked
        gc.enable()


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


def worker_start(asked: str, trainer: Any, images: Any) -> Any:
    """The context in which loader processes start; None is Python's default.

    "fork" shares the lists of images with the workers. But a process whose NCCL runs has threads, and a fork in the
    wrong moment hangs. "forkserver" has a fresh process fork them, "spawn" takes seconds to start each anew; both send
    them a copy of the lists.

    Args:
        asked: one of `STARTS`. "auto" is fork, but forkserver if the Trainer is on CUDA and `images` can be sent.

    Raises:
        UserError: the images cannot be sent to another process.
    """
    import multiprocessing

    on_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
    if asked == "auto" and sys.platform != "linux":
        return None  # a fork is not safe there
    if asked == "fork" or (asked == "auto" and not on_cuda):
        return multiprocessing.get_context("fork")
    if refused := _cannot_send(images):
        if asked != "auto":
            raise UserError(f"--data.worker_start {asked}: {refused}; take fork")
        from lightning.pytorch.utilities import rank_zero_info

        rank_zero_info(f"workers are forked: {refused}")
        return multiprocessing.get_context("fork")
    if asked != "spawn":
        _start_server()
    return multiprocessing.get_context("spawn" if asked == "spawn" else "forkserver")


def _start_server() -> None:
    """Start the process that forks workers, unless it runs. It inherits that signals which ask to stop are blocked."""
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload([SERVED])
    resource_tracker.ensure_running()  # now, because its start ends with unblocking signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Nowhere:
    def write(self, data: Any) -> None:
        pass


def _cannot_send(images: Any) -> str:
    """Why these images cannot be sent to another process; empty if they can."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler(_Nowhere()).dump(images)
    except Exception as error:  # of many kinds: it is the user's data set
        return f"the data set or its transform cannot be sent to another process ({one_line(error)})"
    return ""

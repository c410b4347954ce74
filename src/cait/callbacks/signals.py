"""Signals that ask a run to stop, taken note of and agreed on by all processes."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""A scheduler's end, Ctrl-C, and what SLURM is asked to send ahead of the end."""


class StopSignals:
    """Handlers that only take note; the second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._found: dict[signal.Signals, Any] = {}
        self._group: Any = None

    def watch(self, trainer: Trainer) -> None:
        """Take over from Lightning, whose handlers save nothing, or from within any line of Python."""
        if threading.current_thread() is threading.main_thread():
            self._found = {signum: signal.signal(signum, self._note) for signum in STOPPING}
        if trainer.world_size > 1:
            # On the CPU, so that to agree does not wait for the GPU's queue of work. Lightning asks the
            # same question with a broadcast on the device before every batch; with this it need not.
            self._group = dist.new_group(backend="gloo")
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum

    def agreed(self) -> int:
        """The signal that any of the processes has received, 0 if none has; every process must ask."""
        if self._group is None:
            return self.received
        signum = torch.tensor(self.received)
        dist.all_reduce(signum, dist.ReduceOp.MAX, group=self._group)
        return int(signum)

    def restore(self) -> None:
        """Put back what was found, unless Lightning has put back what it had found before."""
        for signum, handler in self._found.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self._found = {}

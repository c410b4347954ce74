"""Signals that ask a run to stop: noted, then agreed on by all processes."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Trainer

from cait import loops
from cait.cores import STOPPING

STEPS, SECONDS = 10, 5.0
"""Optimizer steps between two agreements of several processes, and fewer if they take longer than that."""


class StopSignals:
    """Handlers that only note a signal, and the processes' agreement on it. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._handlers: dict[signal.Signals, Any] = {}
        """Those of before."""

    def watch(self, trainer: Trainer) -> None:
        """Replace Lightning's handlers, which save nothing, or save in the middle of any line of Python."""
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                is_under_nohup = (
                    number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
                )
                if not is_under_nohup:
                    self._handlers[number] = signal.signal(number, self._note)
        self._next_step = 0
        self._last_step = trainer.global_step
        self._last_time = time.monotonic()
        loops.ask_nobody_about_signals(trainer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum

    def is_due(self, trainer: Trainer) -> bool:
        """Whether to ask after this step. To ask makes several processes wait for their devices."""
        return trainer.world_size == 1 or trainer.global_step >= self._next_step

    def ask_next(self) -> None:
        """Ask after the next step: all processes have just been together, as in a validation."""
        self._next_step = 0

    def agreed(self, trainer: Trainer, save: bool) -> tuple[int, bool]:
        """(the signal that some process has received or 0, whether process 0 wants to save): the same for all.

        All processes ask after the same steps, because they also agree on how long a step takes.
        """
        if trainer.world_size == 1:
            return self.received, save
        step = trainer.global_step
        strategy = trainer.strategy
        milliseconds = 1000 * (time.monotonic() - self._last_time) / max(1, step - self._last_step)
        wishes = [self.received, save and trainer.is_global_zero, int(milliseconds)]
        agreed = strategy.reduce(torch.tensor(wishes, device=strategy.root_device), reduce_op="max")
        received, any_saves, slowest = agreed.tolist()
        steps_in_time = int(1000 * SECONDS) // max(1, slowest)
        self._next_step = step + max(1, min(STEPS, steps_in_time))
        self._last_step = step
        self._last_time = time.monotonic()
        return received, bool(any_saves)

    def restore(self) -> None:
        """Put back the handlers of before, unless Lightning has put back its own."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._handlers = {}

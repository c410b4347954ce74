"""What asks a run to stop, a signal or one process alone: noted, then agreed on by all processes."""

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from lightning import pytorch
from lightning.pytorch.callbacks import Checkpoint

from cait import loops
from cait.cores import STOPPING

STEPS, SECONDS = 10, 5.0
"""Optimizer steps between two agreements of several processes, and fewer if they take longer than that."""


class Trainer(pytorch.Trainer):
    """Lightning's, whose processes stop after the same batch.

    One of several may ask for a stop alone, as by its own clock. `should_stop` is true once all know of it.
    """

    asks_to_stop = False
    _stops = False

    @property
    def should_stop(self) -> bool:
        return self._stops

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.world_size > 1:
            self.asks_to_stop = True
        else:
            self._stops = value

    def stop(self) -> None:
        """Stop, in all processes."""
        self._stops = True


class StopTogether(Checkpoint):
    """Agree on a stop where all processes are together anyway. As a Checkpoint it comes after all that may ask."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.reduce_boolean_decision(trainer.asks_to_stop, all=False):
            trainer.stop()

    on_validation_end = on_train_epoch_end = on_train_start


class StopSignals:
    """Handlers that only note a signal, and the processes' agreement on it. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._handlers: dict[signal.Signals, Any] = {}
        """Those of before."""

    def watch(self, trainer: pytorch.Trainer) -> None:
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

    def is_due(self, trainer: pytorch.Trainer) -> bool:
        """Whether to ask after this step. To ask makes several processes wait for their devices."""
        return trainer.world_size == 1 or trainer.global_step >= self._next_step

    def ask_next(self) -> None:
        """Ask after the next step: all processes have just been together, as in a validation."""
        self._next_step = 0

    def agreed(self, trainer: Any, save: bool) -> tuple[int, bool]:
        """(the signal that some process has received or 0, whether process 0 wants to save): the same for all.

        If a process asks for a stop, all stop after the next batch. All processes agree after the same steps, because
        they also agree on how long a step takes.
        """
        if trainer.world_size == 1:
            return self.received, save
        step = trainer.global_step
        strategy = trainer.strategy
        milliseconds = 1000 * (time.monotonic() - self._last_time) / max(1, step - self._last_step)
        asks_to_stop = getattr(trainer, "asks_to_stop", False)  # Lightning's own Trainer has none
        wishes = [self.received, save and trainer.is_global_zero, asks_to_stop, int(milliseconds)]
        agreed = strategy.reduce(torch.tensor(wishes, device=strategy.root_device), reduce_op="max")
        received, any_saves, any_asks, slowest = agreed.tolist()
        if any_asks:
            trainer.stop()
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

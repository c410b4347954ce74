"""Signals that ask a run to stop: noted, then agreed on by all processes."""

import contextlib
import errno
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Trainer

from cait import loops
from cait.cores import STOPPING, discard

LOST = (errno.EIO, errno.EPIPE)
"""Errors of a stream whose terminal or reader has gone."""
STEPS, SECONDS = 10, 5.0
"""Optimizer steps between two agreements of several processes, and fewer if they take longer than that."""


class StopSignals:
    """Handlers that only note a signal, and the processes' agreement on it. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._found: dict[signal.Signals, Any] = {}

    def watch(self, trainer: Trainer) -> None:
        """Replace Lightning's handlers, which save nothing, or save in the middle of any line of Python."""
        if threading.current_thread() is threading.main_thread():
            kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # under nohup
            self._found = {signum: signal.signal(signum, self._note) for signum in STOPPING if signum not in kept}
        self._next_step, self._last_step, self._last_time = 0, trainer.global_step, time.monotonic()
        loops.ask_nobody_about_signals(trainer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum

    def is_due(self, trainer: Trainer) -> bool:
        """Whether to ask after this step. To ask makes several processes wait for their devices."""
        return trainer.world_size == 1 or trainer.global_step >= self._next_step

    def agreed(self, trainer: Trainer, save: bool) -> tuple[int, bool]:
        """(the signal that some process has received or 0, whether process 0 wants to save): the same for all.

        All processes ask after the same steps, because they also agree on how long a step takes.
        """
        if trainer.world_size == 1:
            return self.received, save
        step, now = trainer.global_step, time.monotonic()
        milliseconds = int(1000 * (now - self._last_time) / max(1, step - self._last_step))
        own = [self.received, save and trainer.is_global_zero, milliseconds]
        on_device = torch.tensor(own, device=trainer.strategy.root_device)
        received, any_saves, slowest = trainer.strategy.reduce(on_device, reduce_op="max").tolist()
        self._next_step = step + max(1, min(STEPS, int(1000 * SECONDS) // max(1, slowest)))
        self._last_step, self._last_time = step, time.monotonic()
        return received, bool(any_saves)

    def restore(self) -> None:
        """Put back the handlers that were found, unless Lightning has put back its own."""
        for signum, handler in self._found.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self._found = {}


class _Output:
    """A standard stream of a run: if its terminal or its reader has gone, that is a SIGHUP and not an error.

    A run that ignores SIGHUP goes on without output. One that does not heed it yet, or any longer, gets the error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return partial(self._or_nowhere, found) if name in ("write", "flush") else found

    def _or_nowhere(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            if error.errno not in LOST or signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                raise
            discard(self._stream)
            signal.raise_signal(signal.SIGHUP)


@contextlib.contextmanager
def output_may_go() -> Iterator[None]:
    """While a run trains, print to streams that may lose their terminal or their reader."""
    with contextlib.redirect_stdout(_Output(sys.stdout)), contextlib.redirect_stderr(_Output(sys.stderr)):
        yield

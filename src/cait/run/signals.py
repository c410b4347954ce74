"""Signals that ask a run to stop: noted, then agreed on by all processes."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from cait.cores import STOPPING, discard

LOST = (errno.EIO, errno.EPIPE)
"""Errors of a stream whose terminal or reader has gone."""
SECONDS = 0.5
"""Time between two answers of process 0, if the steps are shorter."""


class StopSignals:
    """Handlers that only note a signal, and the processes' agreement on it. A second Ctrl-C interrupts at once.

    Process 0 decides. It puts answer number n into the store of the rendezvous, which every process can reach.
    Every process reads the answer after the same step, because the answer before it named that step. So all
    do the same after the same step, however far apart they are. An answer never changes.
    """

    def __init__(self) -> None:
        self.received = 0
        self._found: dict[signal.Signals, Any] = {}
        self._store: dist.Store | None = None

    def watch(self, trainer: Trainer) -> None:
        """Replace Lightning's handlers, which save nothing, or save in the middle of any line of Python."""
        if threading.current_thread() is threading.main_thread():
            kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # under nohup
            self._found = {signum: signal.signal(signum, self._note) for signum in STOPPING if signum not in kept}
        if trainer.world_size > 1:
            # Not a Gloo group: it would listen at the address of the host's name, which other hosts often cannot reach.
            name = trainer.strategy.broadcast(uuid.uuid4().hex)  # the store may know an earlier run
            store = dist.PrefixStore(f"cait/signals/{name}", dist.distributed_c10d._get_default_store())
            self.share(store, trainer.is_global_zero, trainer.global_step)
            # Before every batch Lightning would ask whether to stop, with a broadcast on the device.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def share(self, store: dist.Store, decides: bool, step: int) -> None:
        """Agree through an empty store that all processes can reach; `decides` is true on one of them."""
        self._store, self._decides = store, decides
        self._announced = False
        self._answers = self._forgotten = self._stop = 0
        self._next = step + 1
        self._stride, self._last_step, self._last_time = 1, step, time.monotonic()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum

    def agreed(self, step: int, save: bool = False, wait: bool = True) -> tuple[int, bool]:
        """(a signal that some process has received or 0, whether process 0 wants to save)

        Every process must ask after every step. All get the same answer after the same step.

        Args:
            step: optimizer steps done.
            save: whether to save; only process 0 is heard.
            wait: for the step that the last answer named; False asks now. The same on all processes.
        """
        if self._store is None:
            return self.received, save
        if self.received and not self._announced:
            self._store.set("received", str(self.received))
            self._announced = True
        if self._stop or (wait and step < self._next):
            return self._stop, False
        self._answers += 1
        answer = str(self._answers)
        if self._decides:
            received = int(self._store.get("received")) if self._store.check(["received"]) else 0
            self._store.set(answer, f"{received} {int(save)} {step + self._steps_until_next(step)}")
        self._stop, save_, self._next = map(int, self._store.get(answer).split())
        return self._stop, bool(save_)

    def _steps_until_next(self, step: int) -> int:
        # At most doubled: a GPU only queues its first steps, so they seem to take no time.
        now, steps = time.monotonic(), step - self._last_step
        if steps:
            self._stride = max(1, min(2 * self._stride, int(steps * SECONDS / (now - self._last_time))))
        self._last_step, self._last_time = step, now
        return self._stride

    def forget(self) -> None:
        """Delete the answers so far from the store. Nobody needs them after all processes have met, as in a save."""
        if self._store is not None and self._decides:
            for answer in range(self._forgotten + 1, self._answers + 1):
                self._store.delete_key(str(answer))
            self._forgotten = self._answers

    def restore(self) -> None:
        """Put back the handlers that were found, unless Lightning has put back its own."""
        self._store = None
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
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._or_nowhere():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._or_nowhere():
            self._stream.flush()

    @contextlib.contextmanager
    def _or_nowhere(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in LOST or signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                raise
            discard(self._stream)
            signal.raise_signal(signal.SIGHUP)


@contextlib.contextmanager
def output_may_go() -> Iterator[None]:
    """While a run trains, print to streams that may lose their terminal or their reader."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Output, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

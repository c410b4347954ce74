"""Standard streams whose terminal or reader may go."""

import contextlib
import errno
import signal
import sys
from typing import Any

from lightning.pytorch import Callback

from cait.cores import discard

LOST = (errno.EIO, errno.EPIPE)
"""Errors of a stream whose terminal or reader has gone."""


class Output:
    """A standard stream of a run: if its terminal or its reader has gone, that is a SIGHUP and not an error.

    A run that ignores SIGHUP goes on without output. One that does not heed it yet, or any longer, gets the error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._may_go():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._may_go():
            self._stream.flush()

    @contextlib.contextmanager
    def _may_go(self) -> Any:
        try:
            yield
        except OSError as error:
            if error.errno not in LOST or signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                raise
            discard(self._stream)
            signal.raise_signal(signal.SIGHUP)


class GuardedOutput(Callback):
    """While a run trains, print to streams that may lose their terminal or their reader."""

    def __init__(self) -> None:
        self._streams = contextlib.ExitStack()

    def setup(self, *_: Any, **__: Any) -> None:
        self._streams.enter_context(contextlib.redirect_stdout(Output(sys.stdout)))
        self._streams.enter_context(contextlib.redirect_stderr(Output(sys.stderr)))

    def teardown(self, *_: Any, **__: Any) -> None:
        self._streams.close()

    on_exception = teardown

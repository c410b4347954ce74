"""A run whose terminal or reader has gone."""

import contextlib
import os
import signal
import sys

import pytest

from cait.cores import discard
from cait.extras.terminal.output import GuardedOutput


def test_a_run_whose_output_goes_stops_unless_it_ignores_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (lambda number, _: heard.append(number), signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            reader, writer = os.pipe()
            os.close(reader)
            dies = (
                pytest.raises(BrokenPipeError)
                if handler == signal.SIG_DFL
                else contextlib.nullcontext()
            )
            output = GuardedOutput()
            with open(writer, "w") as stream, monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stream)
                output.setup()
                with dies:
                    print("lost", flush=True)
                    print("lost too", flush=True)
                output.teardown()
                assert sys.stdout is stream
                discard(stream)
        assert heard == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)

"""A run whose terminal or reader has gone."""

import os
import signal
import sys

import pytest

from cait.cores import discard
from cait.extras.terminal.output import GuardedOutput


@pytest.fixture(autouse=True)
def hangup():
    """The handler of before comes back."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def print_under_guard():
    """To a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    output = GuardedOutput()
    with open(writer, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        output.setup()
        try:
            print("lost", flush=True)
            print("lost too", flush=True)
        finally:
            output.teardown()
            assert sys.stdout is stream
            discard(stream)


def test_a_run_whose_output_goes_gets_the_signal_of_a_closed_terminal():
    heard = []
    signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    print_under_guard()
    assert heard == [signal.SIGHUP]


def test_a_run_under_nohup_goes_on():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    print_under_guard()


def test_a_program_that_does_not_heed_the_signal_ends():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(BrokenPipeError):
        print_under_guard()

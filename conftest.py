"""Fixtures for the tests of the core and of the extras."""

import atexit
import gc
import os

pytest_plugins = ["harness"]
gc.disable()  # while the tests are imported, which takes half as long


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays
    gc.set_threshold(100_000)  # to look through what runs make took a tenth of the time
    gc.enable()


atexit.register(gc.unfreeze)  # libraries would take what stays for a leak
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # before that: to free every object takes seconds

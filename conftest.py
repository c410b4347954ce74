"""Fixtures for the tests of the core and of the extras."""

import atexit
import gc
import os

pytest_plugins = ["harness"]
gc.disable()  # while the tests are imported, which takes half as long
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays
    gc.enable()


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        gc.unfreeze()


if IS_WORKER:
    atexit.register(os._exit, 0)  # Python would free every object first, which takes seconds

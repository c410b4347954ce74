"""Fixtures for the tests of the core and of the extras."""

import gc

pytest_plugins = ["harness"]
gc.disable()  # while the tests are imported, which takes half as long


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()

"""Fixtures for the tests of the core and of the extras."""

pytest_plugins = ["harness"]

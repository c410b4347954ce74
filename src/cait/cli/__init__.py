"""The command `cait`."""

from cait.cli.command import main

__all__ = ["main"]

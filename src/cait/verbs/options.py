"""What the verbs have in common on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from cait import run
from cait.errors import UserError

TRUST = "--trust-config"


class Options(argparse.ArgumentParser):
    """Options of a verb; an error is a UserError."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(prog=f"cait {verb}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def split_trust(arguments: list[str]) -> tuple[bool, list[str]]:
    """(whether --trust-config is given, the other arguments)"""
    others = [argument for argument in arguments if argument.replace("_", "-") != TRUST]
    return len(others) < len(arguments), others


def split_run(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    """(the folder of the run that comes first, the other arguments)

    Raises:
        UserError: no run is named, or there is none of this name.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"which run? `make {verb} RUN=NAME` or `cait {verb} NAME`; runs are the folders in {run.LOGS}/")
    return run.find(arguments[0]), arguments[1:]

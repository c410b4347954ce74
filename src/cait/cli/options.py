"""What the verbs have in common on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal, NoReturn

from cait import plugins
from cait.errors import UserError
from cait.plugins import Setting
from cait.run import rundir
from cait.run.program import Program

TRUST = "--trust-config"
SETTINGS = [
    Setting("run_name", str | None, None, "Folder in logs/; null: the configuration's name, numbered if taken."),
    Setting("output", str | None, None, "File of the scores; default evaluation.json.", verbs=["eval"]),
    Setting("save_every_n_minutes", float | None, 10.0, "Minutes between checkpoints. Every epoch saves one too."),
    Setting("save_every_n_steps", int | None, None, "Steps between checkpoints; null saves by time and epochs alone."),
    Setting("max_nonfinite_steps", int, 10, "Skipped steps in a row, without a finite gradient, that end the run."),
    Setting(
        "best_metric",
        str | None,
        None,
        "Metric that chooses best.ckpt, as metrics.csv names it, and so the weights that all verbs use; null: "
        "val/acc1, or val/mAP with several labels an image, of the moving average (val_ema/...) if there is one.",
    ),
    Setting("best_mode", Literal["max", "min"] | None, None, "Which --best_metric is best; null: as the metric says."),
]
"""Settings of a run that no class takes; extras add theirs."""


class Options(argparse.ArgumentParser):
    """Options of a verb; an error is a UserError."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(prog=f"cait {verb}", description=description, allow_abbrev=False)

    def add_trust(self) -> None:
        """Take --trust-config, as `trusted`."""
        told = "run the code that a run names and this account has not signed"
        self.add_argument(TRUST, "--trust_config", action="store_true", dest="trusted", help=told)

    def add_weights(self) -> None:
        """Take --raw or --ema, as `ema`: False or True, or None for the weights that chose the checkpoint."""
        which = self.add_mutually_exclusive_group()
        raw, ema = "the raw weights", "their moving average; default: those that chose best.ckpt"
        which.add_argument("--raw", action="store_const", const=False, dest="ema", help=raw)
        which.add_argument("--ema", action="store_const", const=True, help=ema)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def replaced(verb: str, arguments: list[str], program: Program) -> list[str]:
    """`arguments` after what extras put in place of some of them, such as a row of a table by its settings."""
    for replace in plugins.of_kind("replace_arguments"):
        arguments = replace(verb, arguments, program)
    return arguments


def split_trust(arguments: list[str]) -> tuple[bool, list[str]]:
    """(whether --trust-config is given, the other arguments)"""
    others = [argument for argument in arguments if argument.replace("_", "-") != TRUST]
    return len(others) < len(arguments), others


def split_run(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    """(the folder of the run that comes first, the other arguments). Raises UserError if none is named, or there."""
    if not arguments or not arguments[0] or arguments[0].startswith("-"):
        raise UserError(f"which run? `cait {verb} NAME`; runs are the folders in {rundir.LOGS}/")
    return rundir.folder_of(arguments[0]), arguments[1:]

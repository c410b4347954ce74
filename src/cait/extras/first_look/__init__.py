"""Refuse unknown settings, broken configurations and missing files before torch is imported."""

from pathlib import Path

from cait.cli.options import named_run
from cait.run.program import Program


def check_arguments(verb: str, arguments: list[str], program: Program) -> None:
    if verb == "export" and arguments and not arguments[0].startswith("-") and not Path(arguments[0]).exists():
        named_run(verb, arguments[0])  # its options are known only with torch
    if verb in ("fit", "resume", "eval"):
        from cait.extras.first_look.look import look

        look(verb, arguments, program)

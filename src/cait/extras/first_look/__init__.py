"""Refuse unknown settings, broken configurations and missing files before torch is imported."""

from cait.run.program import Program


def check_arguments(verb: str, arguments: list[str], program: Program) -> None:
    if verb in ("fit", "resume", "eval"):
        from cait.extras.first_look.look import look

        look(verb, arguments, program)

"""`cait --print_completion bash|zsh`: the script that completes verbs, settings and the names of runs."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from cait.cli.command import verbs
from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program

# shtab asks these functions of the shell for the names of runs.
RUNS = {
    "bash": """
_cait_runs() {
  compgen -W "$(cd LOGS 2>/dev/null && ls -d */ 2>/dev/null | tr -d / | grep -E '^[[:alnum:]_.=+-]+$')" -- "$1"
  compgen -d -- "$1"
}""",
    "zsh": """
_cait_runs() { _alternative 'runs:run:(LOGS/*(/N:t))' 'folders:folder:_files -/' }""",
}
FILES = ("--config", "--ckpt_path", "--data.root", "--output")
"""Settings that take files."""


def show(arguments: list[str], program: Program) -> None:
    """Print the script for a shell."""
    if len(arguments) != 1 or arguments[0] not in RUNS:
        raise UserError(f"--print_completion takes {' or '.join(RUNS)}, got {' '.join(arguments) or 'nothing'}")
    import shtab

    settings, parser = _settings_of_fit(program), argparse.ArgumentParser("cait", add_help=False)
    under = parser.add_subparsers()
    for name, verb in verbs().items():
        if name.startswith("-"):  # the one that is running
            continue
        completed: Any = under.add_parser(name, add_help=False, help=name)  # without help shtab leaves it out
        for action in settings if "fit" in verb.takes else []:
            option = completed.add_argument(*action.option_strings, choices=action.choices, help="")
            if action.option_strings[0] in FILES:
                option.complete = shtab.FILE
        runs = dict.fromkeys(RUNS, "_cait_runs")
        completed.add_argument("given", nargs="*").complete = runs if "run" in verb.takes else shtab.FILE
    print(shtab.complete(parser, arguments[0], preamble=RUNS[arguments[0]].replace("LOGS", str(rundir.LOGS))))


def _settings_of_fit(program: Program) -> list[argparse.Action]:
    from cait.cli.lightning import CaiTCLI

    settings: list[argparse.Action] = []

    class OnlyParser(CaiTCLI):
        def parse_arguments(self, *_: Any) -> None:
            # Without settings that follow from others: for argparse they would be words without an option.
            actions = self._parser("fit")._actions
            settings.extend(action for action in actions if "".join(action.option_strings).startswith("-"))
            raise SystemExit  # before LightningCLI goes on to train

    with contextlib.suppress(SystemExit):
        OnlyParser(["fit"], program)
    return settings

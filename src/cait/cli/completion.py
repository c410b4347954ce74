"""`cait --print_completion bash|zsh`: the script that completes verbs, settings and the names of runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program

SHELLS = ("bash", "zsh")
OF_FIT = ("resume", "find-lr", "find-batch")
"""Verbs that take the settings of fit too."""
WITHOUT_RUN = ("find-lr", "find-batch", "zoo", "paper", "study", "sweep", "shards", "imagenet-check")
"""Verbs that are given files or nothing at all; the others are given runs."""
RUNS = {
    "bash": """
_cait_runs() {
  compgen -W "$(cd LOGS 2>/dev/null && ls -d */ 2>/dev/null | tr -d / | grep -E '^[[:alnum:]_.=+-]+$')" -- "$1"
  compgen -d -- "$1"
}""",
    "zsh": """
_cait_runs() { _alternative 'runs:run:(LOGS/*(/N:t))' 'folders:folder:_files -/' }""",
}


def script(arguments: list[str], verbs: Iterable[str]) -> str:
    """The script for a shell.

    Raises:
        UserError: the shell is unknown.
    """
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UserError(f"--print_completion takes {' or '.join(SHELLS)}, got {' '.join(arguments) or 'nothing'}")
    import shtab

    settings = _settings()
    parser = argparse.ArgumentParser("cait", add_help=False)
    under = parser.add_subparsers()
    for verb in verbs:
        own = under.add_parser(verb, add_help=False, help=verb)  # without help shtab leaves it out
        for action in settings.get("fit" if verb in OF_FIT else verb, []):
            _add(own, action, shtab.FILE)
        if verb not in settings:
            given = own.add_argument("given", nargs="*")
            names = dict.fromkeys(SHELLS, "_cait_runs")
            given.complete = shtab.FILE if verb in WITHOUT_RUN else names  # type: ignore[attr-defined]
    return shtab.complete(parser, arguments[0], preamble=RUNS[arguments[0]].replace("LOGS", str(rundir.LOGS)))


def _add(parser: argparse.ArgumentParser, action: argparse.Action, file: Any) -> None:
    """Take an option of another parser, by its name."""
    added = parser.add_argument(*action.option_strings, choices=action.choices, help="")
    if action.option_strings[0] in ("--config", "--ckpt_path", "--data.root", "--output"):
        added.complete = file  # type: ignore[attr-defined]


class _MadeError(Exception):
    """Carries a parser's options out of LightningCLI, which would go on to train."""


def _settings() -> dict[str, list[argparse.Action]]:
    """The options of LightningCLI's verbs."""
    from lightning.pytorch.cli import LightningCLI

    from cait.cli.lightning import CaiTCLI

    class Parsers(CaiTCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise _MadeError(self._parser(self.arguments[0])._actions)

    settings = {}
    for verb in LightningCLI.subcommands():
        try:
            Parsers([verb], Program())
        except _MadeError as made:
            settings[verb] = [action for action in made.args[0] if action.option_strings]
    return settings

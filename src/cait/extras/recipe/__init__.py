"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cait.cli.options import Line
    from cait.run.program import Program

BEGUN = time.monotonic()
"""When `cait` was started: extras are imported before anything that takes long."""
GROUPS = {"fields": "cait.extras.recipe.stem:StemFields"}


def add_settings(line: Line, program: Program) -> None:
    """Add the recipe of a folder to the settings given beside it."""
    if line.verb != "fit" or program.module or program.data:  # the rules know the settings of the package's own classes
        return
    if {"data.root", "from", "minutes"} & line.typed or any(path is None for path, _ in line.layers):
        from cait.extras.recipe.arguments import add_recipe

        add_recipe(line, program)

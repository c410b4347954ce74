"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cait.run.program import Program

BEGUN = time.monotonic()
"""When `cait` was started: extras are imported before anything that takes long."""
GROUPS = {"fields": "cait.extras.recipe.stem:StemFields"}


def replace_arguments(verb: str, arguments: list[str], program: Program) -> list[str]:
    """Add the recipe of a folder to the settings given beside it."""
    if verb != "fit" or program.module or program.data:  # the rules know the settings of the package's own classes
        return arguments
    asking = {"--data", "--data.root", "--from", "--minutes"}
    names = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    if asking.isdisjoint(names):
        return arguments
    from cait.extras.recipe.arguments import add_recipe

    return add_recipe(arguments, program)

"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cait.plugins import Run, Setting

if TYPE_CHECKING:
    from cait.cli.options import Line
    from cait.run.program import Program

GROUPS = {"fields": "cait.extras.recipe.stem:StemFields"}
SETTINGS = [
    Setting(
        "plan_minutes",
        float | None,
        None,
        "Minutes of a run, from the command to its end: after the first validation the epochs are planned anew, by "
        "their pace. A recipe chosen for a folder sets it, from `--minutes 10`; `--from FILE` names its weights.",
        ("fit",),
    ),
    Setting(
        "race",
        dict[str, Any] | None,
        None,
        "What a recipe races a run from weights against. `--race true` asks for it.",
        ("fit",),
    ),
]


def add_settings(line: Line, program: Program) -> None:
    """Add the recipe of a folder to the settings given beside it."""
    # a data module that opens its images itself may have none in the folder
    if line.verb != "fit" or program.data_overrides("make_source"):
        return
    if {"data.root", "from", "minutes", "race"} & line.typed or any(
        path is None for path, _ in line.layers
    ):
        from cait.extras.recipe.arguments import add_recipe

        add_recipe(line, program)


def callbacks(run: Run) -> list[Any]:
    """What plans the epochs anew, and what races."""
    found: list[Any] = []
    if run.config.plan_minutes is not None:
        from cait.extras.recipe.plan import Plan

        found.append(Plan(run))
    if run.config.race is not None:
        from cait.extras.recipe import race

        found += race.callbacks_of(run)
    return found

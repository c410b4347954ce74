"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why.

The recipes use small copies of large files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cait.run.program import Program


@dataclass(frozen=True)
class OwnImages:
    """What suits collections of your own."""

    copies_dir: str | None = None
    """Folder for copies of the images that `shrink` has halved, so that each file is read only once. None keeps none.
    The pixels are the same, and the folder may be removed at any time. Only image files have copies."""


GROUPS = {"data": "cait.extras.recipe:OwnImages"}


def replace_arguments(verb: str, arguments: list[str], program: Program) -> list[str]:
    """Put the recipe of a folder in front of the settings given beside it."""
    if verb != "fit" or program.module or program.data:  # the rules know the settings of the package's own classes
        return arguments
    asking = {"--data", "--data.root", "--from", "--minutes"}
    if asking.isdisjoint(argument.partition("=")[0] for argument in arguments):
        return arguments
    from cait.extras.recipe.arguments import replace_folder

    return replace_folder(arguments, program)


def wrap_samples(samples: Any, settings: Mapping[str, Any]) -> Any:
    """The image files, the large ones as their small copies if copies are kept."""
    from cait.data.listing import Files

    if settings["copies_dir"] is None or settings["shrink"] is None or not isinstance(samples, Files):
        return samples
    from pathlib import Path

    from cait.data.reading import Reading
    from cait.extras.recipe.copies import Copies
    from cait.settings import group

    return Copies(samples, group(Reading, settings), Path(settings["copies_dir"]))

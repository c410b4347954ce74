"""Train on a folder of images without a configuration: look at the folder, choose a recipe, say why.

The recipes use small copies of large files, and an order of images in which classes are balanced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cait.errors import UserError
from cait.settings import check_choice

if TYPE_CHECKING:
    from cait.run.program import Program

LEARNT = ("data.balance",)
"""It is written to."""


@dataclass(frozen=True)
class OwnImages:
    """What suits collections of your own."""

    copies_dir: str | None = None
    """Folder for copies of the images that `shrink` has halved, so that each file is read only once. None keeps none.
    The pixels are the same, and the folder may be removed at any time. Only image files have copies."""
    balance: Literal["sqrt", "full"] | None = None
    """Draw the images of small classes more often, and those of large classes less. "full" gives all classes the same
    share of an epoch. "sqrt" gives each class a share in proportion to the square root of its number of images."""

    def __post_init__(self) -> None:
        check_choice(self, {"balance": ("sqrt", "full", None)})


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


def image_order(source: Any, settings: Mapping[str, Any]) -> Any:
    """The balanced order, if the settings ask for it; otherwise None."""
    if settings["balance"] is None:
        return None
    if getattr(source, "label_sets", None) is not None:
        raise UserError("data.balance draws by one class an image; for several give --model.class_weights balanced")
    from cait.data.dataset import known_labels
    from cait.extras.recipe.balance import Balanced

    return Balanced(known_labels(source.train, settings["root"]), settings["balance"])


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

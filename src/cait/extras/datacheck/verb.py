"""`cait imagenet-check`."""

from __future__ import annotations

from pathlib import Path

from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program


def imagenet_check(arguments: list[str], program: Program) -> None:
    """Count the images of a data folder and decode some of them."""
    options = Options("imagenet-check", "Count the images of a data folder and decode some.")
    options.add_argument("root", metavar="DIR", type=Path, help="with train/<class>/ and val/<class>/")
    options.add_argument(
        "--images",
        "--pictures",
        type=int,
        default=2000,
        metavar="N",
        help="how many to decode, over all classes; default 2000",
    )
    given = options.parse_args(arguments)
    if not given.root.name and given.root == Path():
        raise UserError("imagenet-check needs a folder: `make imagenet-check DATA=FOLDER`")
    if given.images < 0:
        raise UserError(f"--images must be at least 0, got {given.images}")
    from cait.extras.datacheck.check import check

    check(given.root, given.images)

"""`cait visualize`: maps of images, and a page with them, the curves and the worst mistakes."""

import os
import shlex
from pathlib import Path

from cait import disk, signature
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import UserError
from cait.extras import networks
from cait.run.program import Program


def visualize(arguments: list[str], program: Program) -> None:
    """Draw the maps of images, and put them on an HTML page with what a run has logged."""
    options = Options(
        "visualize",
        "Draw where a network looks in images, and a page of what the network gets wrong.",
    )
    networks.add_options(options)
    options.add_argument(
        "--images", nargs="+", metavar="FILE|DIR", help="default: validation images of the run"
    )
    options.add_argument(
        "--num_images", type=int, default=16, metavar="N", help="draw the first N; default 16"
    )
    options.add_argument(
        "--no_validation", action="store_true", help="do not score the run's validation set"
    )
    options.add_argument(
        "--output", type=Path, metavar="DIR", help="default logs/RUN/visualize, or visualize"
    )
    args = options.parse_args(arguments)
    checkpoint, folder = networks.chosen(args, "visualize")
    if not (folder or args.images):
        raise UserError(
            "which images? name files or folders with --images; only a run has images of its own"
        )
    from cait.extras.visualize import sections

    with signature.only_own(args.trusted):
        loaded = networks.load(args, checkpoint, folder, program)
        loaded.network.to(loading.device())
        output = args.output or Path(folder or ".", "visualize")
        disk.check_output(output, folder=True)
        page = sections.write(
            loaded, folder, args, output, shlex.join(["cait", "visualize", *arguments])
        )
    print(os.path.relpath(page))

"""`cait visualize`: attention maps of images, and a page with them, the curves and the worst mistakes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from cait import disk
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program


def visualize(arguments: list[str], program: Program) -> None:
    """Draw the attention maps of images, and put them on an HTML page with what a run has logged."""
    given = _options(arguments)
    checkpoint, folder = (None, None) if given.name else loading.checkpoint_of(given.source, "visualize")
    if folder is None and not given.images:
        raise UserError("which images? name files or folders with --images; only a run has images of its own")
    from cait.extras.visualize import sections
    from cait.guards import trust

    with trust.only_own(given.trusted):
        if checkpoint is None:
            loaded = loading.of_name(given.name, given.weights, given.img_size)
        else:
            parts = given.ema, given.img_size, program.module, program.data
            loaded = loading.from_checkpoint(checkpoint, folder, *parts)
        loaded.network.to(loading.device())
        output = given.output or Path(folder or ".", "visualize")
        disk.check_output(output, folder=True)
        output.mkdir(parents=True, exist_ok=True)
        page = sections.write(loaded, folder, given, output, shlex.join(["cait", "visualize", *arguments]))
    print(os.path.relpath(page))


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("visualize", "Draw attention maps of images, and a page of what the network gets wrong.")
    of = options.add_mutually_exclusive_group(required=True)
    of.add_argument("source", metavar="RUN", nargs="?", help="a run, or a checkpoint (.ckpt)")
    of.add_argument("--name", metavar="MODEL", help="a network in place of a run, as xxs24 or timm/resnet18")
    options.add_argument("--weights", metavar="FILE", help="its weights; default: those that timm publishes")
    options.add_argument("--img_size", type=int, metavar="PIXELS", help="another resolution: positions are resized")
    options.add_argument("--images", nargs="+", metavar="FILE|DIR", help="default: validation images of the run")
    options.add_argument("--num_images", type=int, default=16, metavar="N", help="draw the first N; default 16")
    options.add_weights()
    options.add_argument("--no_validation", action="store_true", help="do not score the run's validation set")
    options.add_argument("--output", type=Path, metavar="DIR", help="default logs/RUN/visualize, or visualize")
    options.add_trust()
    return options.parse_args(arguments)

"""`cait visualize`: attention maps of images, and a page with them, the curves and the worst mistakes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from cait import disk
from cait.cli import loading
from cait.cli.options import Options, check_folder, run_missing
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.run.program import Program

FOLDER = Path("visualize")
PAGE = "index.html"
WORST = 24
MANY = 5000
CONFUSIONS = 15


def visualize(arguments: list[str], program: Program) -> None:
    """Draw the attention maps of images, and put them on an HTML page with what a run has logged."""
    given = _options(arguments)
    checkpoint, folder = (
        (None, None) if given.name or given.pretrained else loading.checkpoint_of(given.source, "visualize")
    )
    if folder is None and not given.images:
        raise UserError("which images? name files or folders with --images; only a run has images of its own")
    from cait.extras.visualize import weights
    from cait.guards import trust

    with trust.only_own(folder, given.trusted):
        if given.pretrained:
            loaded = weights.from_timm(given.source, given.img_size)
        elif checkpoint is None:
            loaded = weights.from_weights(given.source, given.name, given.ema, given.img_size)
        else:
            loaded = loading.from_checkpoint(
                checkpoint, folder, given.ema, given.img_size, program.module, program.data
            )
        loaded.network.to(loading.device(folder))
        try:
            _write_page(loaded, folder, given, arguments)
        except OSError as error:
            raise UserError(f"cannot use {error.filename or 'the disk'}: {error.strerror or error}") from error


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("visualize", "Draw attention maps of images, and a page of what the network gets wrong.")
    options.add_argument(
        "source", metavar="RUN", nargs="?", help="a run, a checkpoint (.ckpt), or a file of weights with --name"
    )
    options.add_argument("--images", nargs="+", metavar="FILE|DIR", help="default: validation images of the run")
    options.add_argument("--num_images", type=int, default=16, metavar="N", help="draw the first N; default 16")
    options.add_argument("--ema", action="store_true", help="the moving average instead of the raw weights")
    options.add_argument("--img_size", type=int, metavar="PIXELS", help="another resolution: positions are resized")
    options.add_argument("--name", choices=VARIANTS, help="the model whose weights the file holds")
    options.add_argument(
        "--pretrained", action="store_true", help="RUN is a model, as xxs24: take the weights that timm publishes"
    )
    options.add_argument(
        "--self_attention",
        type=whole_numbers,
        default=[],
        metavar="BLOCK[,BLOCK]",
        help="show these blocks too, from 0",
    )
    options.add_argument(
        "--query", type=whole_numbers, metavar="ROW,COLUMN", help="the patch that asks there; default the centre"
    )
    options.add_argument("--no_validation", action="store_true", help="do not score the run's validation set")
    options.add_argument("--output", type=Path, metavar="DIR", help="default logs/RUN/visualize, or visualize")
    options.add_trust()
    given = options.parse_args(arguments)
    if given.source is None:
        raise run_missing("visualize")
    if given.num_images < 1:
        raise UserError(f"--num_images must be at least 1, got {given.num_images}")
    if given.query is not None and len(given.query) != 2:
        raise UserError("--query takes the row and the column of a patch, as --query 3,4")
    if given.query is not None and not given.self_attention:
        raise UserError("--query is the patch whose self-attention is shown: name blocks with --self_attention")
    if given.pretrained and (given.name or given.ema):
        raise UserError("--pretrained takes neither --name nor --ema: `cait visualize xxs24 --pretrained --images DIR`")
    return given


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as 3,4") from error


def _write_page(loaded: loading.Loaded, folder: Path | None, given: argparse.Namespace, arguments: list[str]) -> None:
    from cait.extras.visualize import images, page
    from cait.model import network

    network.require(loaded.network, loaded.name, "maps", "visualize")
    output = given.output or (folder / FOLDER if folder else FOLDER)
    check_folder(output)
    output.mkdir(parents=True, exist_ok=True)
    drawn = images.draw(loaded, given.images, given.num_images, output, given.self_attention, given.query)
    sections = [("Images", drawn)]
    facts = [("weights", loaded.about), ("model", f"{loaded.name}, {loaded.data.img_size} pixels")]
    if folder is not None:
        sections.append(("Curves", _curves(folder)))
    if folder is not None and not given.no_validation:
        sections += _validation_sections(loaded, facts, needed=not given.images)
    facts.append(("command", shlex.join(["cait", "visualize", *arguments])))
    with disk.whole(output / PAGE) as beside:
        html = page.page(f"{given.source}: what the network sees", facts, sections)
        beside.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")  # file names may be no text
    print(os.path.relpath(output / PAGE))


def _curves(folder: Path) -> str:
    from cait.extras import curves
    from cait.extras.visualize import page

    try:
        return page.wide(page.embed(curves.draw({folder.name: curves.read(folder)}), "curves"))
    except UserError as error:
        return page.paragraph(str(error))


def _validation_sections(loaded: loading.Loaded, facts: list[tuple[str, str]], needed: bool) -> list[tuple[str, str]]:
    """Confusion matrix and mistakes, or a line that says so if the images are missing and not `needed`."""
    from cait.extras.visualize import page

    try:
        return _mistakes(loaded, facts)
    except UserError as error:
        if needed:
            raise
        print(f"the validation set is not scored: {error}")
        return [("Mistakes", page.paragraph(f"The validation set is not scored: {error}"))]


def _mistakes(loaded: loading.Loaded, facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Score the validation set now: figures of an earlier evaluation may be of other weights."""
    from cait.extras.visualize import images, mistakes, page

    validation, names = images.validation(loaded), loaded.class_names
    if len(validation) > MANY:
        print(f"scoring {len(validation):,} validation images; --no_validation leaves that out", flush=True)
    scored = mistakes.score(loaded.network, loaded.data.val_dataloader())
    result = f"top-1 {scored.acc1:.2f} % of {scored.counted.sum():,} validation images"
    print(result)
    facts.append(("scored now", result))
    pairs = [(names[true], names[taken], f"{count:,}") for true, taken, count in scored.confusions(CONFUSIONS)]
    matrix = page.wide(page.embed(mistakes.confusion(scored, names), "confusion matrix"))
    tiles = [
        (
            images.seen(loaded.data, validation[index][0])[1],
            f"true {names[scored.labels[index]]}, predicted {names[scored.predicted[index]]}",
            f"at {scored.probabilities[index]:.1%}, loss {scored.losses[index]:.2f}; {validation.samples.name(index)}",
        )
        for index in scored.worst(WORST)
    ]
    return [
        ("Confusion matrix", matrix + page.table(("true class", "predicted", "images"), pairs)),
        ("Worst mistakes", page.tiles(tiles) if tiles else page.paragraph("Every image is right.")),
    ]

"""`cait card`: collect what a run has written, and put a model card with its pictures into a folder."""

from __future__ import annotations

import os
from pathlib import Path

from cait import ckpt, disk, plugins
from cait.cli import saved
from cait.cli.options import Options, named_run
from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program

WHAT = """\
Write a model card of a run, README.md as the Hugging Face Hub shows it, with the figures of evaluation.json, the
settings, the curves and how to use the model."""
README, CURVES = "README.md", "curves.png"


def card(arguments: list[str], program: Program) -> None:
    """Write the card of a run."""
    options = Options("card", WHAT)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--repo", metavar="OWNER/NAME", help="the model's name on the Hub")
    options.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; default card/ in the run's")
    add_content(options)
    given = options.parse_args(arguments)
    folder = named_run("card", given.run)
    output = given.output or folder / "card"
    disk.check_output(output, folder=True)
    if given.output and (output / README).exists():
        raise UserError(f"{output / README} exists; move it away or name another folder")
    repo = given.repo or f"OWNER/{folder.name}"
    for path in write(folder, output, repo, given.ema, given.license, program):
        print(os.path.relpath(path))


def add_content(options: Options) -> None:
    """The options that say what is in a card."""
    options.add_weights()
    named = "the Hub's identifier, as apache-2.0; default none is named"
    options.add_argument("--license", metavar="ID", help=named)


def write(folder: Path, output: Path, repo: str, ema: bool | None, license: str | None, program: Program) -> list[Path]:
    """Write the card of a run, with its images, into the folder `output`.

    Raises:
        UserError: the run was not scored, or its scores are of another step or data set.
    """
    from cait.extras import scores
    from cait.extras.hub import card_text

    checkpoint = rundir.best_checkpoint(folder, "describe")
    about = scores.read(folder, checkpoint, program.command("eval", folder))
    if ema and "ema" not in about:
        raise UserError(f"{folder} has no scores of a moving average: the run kept none")
    scored = about["raw" if ema is False or "ema" not in about else "ema"]
    state = ckpt.data_state(ckpt.read_checkpoint(checkpoint)) or {}
    config = saved.of_run(folder)
    output.mkdir(parents=True, exist_ok=True)
    images = _images(folder, output)
    tables = plugins.results(folder)
    text = card_text.text(repo, scored, about, config, state, [each.name for each in images], license, tables)
    with disk.whole(output / README) as beside:
        beside.write_text(text, encoding="utf-8")
    return [output / README, *images]


def _images(folder: Path, output: Path) -> list[Path]:
    """Put the curves beside the card, if there are any."""
    from cait.extras import curves, plots

    images = []
    try:
        plots.write(curves.draw({folder.name: curves.read(folder)}), output / CURVES)
        images.append(output / CURVES)
    except UserError as error:
        print(f"without curves: {error}")
    return images

"""`cait card`: collect what a run has written, and put a model card with its pictures into a folder."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from cait import ckpt, disk, plugins
from cait.cli import saved
from cait.cli.options import Options, named_run
from cait.errors import UserError, did_you_mean, one_line
from cait.run import rundir
from cait.run.program import Program

WHAT = """\
Write a model card of a run, README.md as the Hugging Face Hub shows it, with the figures of evaluation.json, the
settings, the curves and how to use the model."""
README = "README.md"
LICENSE_NAMES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl
gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql
ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license apple-amlr apple-ascl intel-research h-research
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma unknown other
"""
"""The Hub's identifiers, see https://huggingface.co/docs/hub/repositories-licenses; it shows no license for others."""


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
    repo = f"OWNER/{folder.name}" if given.repo is None else check_name(given.repo)
    for path in write(folder, output, repo, given.ema, given.license, program):
        print(os.path.relpath(path))


def add_content(options: Options) -> None:
    """The options that say what is in a card."""
    options.add_weights()
    named = "the Hub's identifier, as apache-2.0; default none is named"
    options.add_argument("--license", type=_license, metavar="ID", help=named)


def _license(text: str) -> str:
    if text not in (known := LICENSE_NAMES.split()):
        hint = did_you_mean(text.lower(), known, "; it is one of the Hub's identifiers, as apache-2.0, or other")
        raise argparse.ArgumentTypeError(f"there is no license {text}{hint}")
    return text


def check_name(repo: str | None) -> str:
    """Returns the name of a model on the Hub. Raises UserError if it cannot be one."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo is None or repo.count("/") != 1:
        got = f", not {repo}" if repo else ""
        raise UserError(f"where to? name the model as OWNER/NAME{got}: `cait push RUN OWNER/NAME`")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo} cannot be a name on the Hub: {one_line(error)}") from error
    return repo


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
    ema = "ema" in about if ema is None else ema
    config = saved.of_run(folder)
    state = ckpt.data_state(ckpt.read_checkpoint(checkpoint, without=ckpt.TENSORS)) or {}
    output.mkdir(parents=True, exist_ok=True)
    images = _images(folder, output)
    names = [image.name for image in images]
    text = card_text.text(
        repo, about["ema" if ema else "raw"], about, config, state, names, license, plugins.results(folder)
    )
    with disk.whole(output / README) as beside:
        beside.write_text(text, encoding="utf-8")
    return [output / README, *images]


def _images(folder: Path, output: Path) -> list[Path]:
    """Put the curves and the reliability diagram beside the card, where they exist."""
    from cait.extras import curves, plots
    from cait.extras.hub.card_text import CURVES, RELIABILITY

    images = []
    try:
        plots.write(curves.draw({folder.name: curves.read(folder)}), output / CURVES)
        images.append(output / CURVES)
    except UserError as error:
        print(f"without curves: {error}")
    diagram = folder / f"{Path(rundir.EVALUATION).stem}-{RELIABILITY}"
    if diagram.is_file():
        with disk.whole(output / RELIABILITY) as beside:
            shutil.copyfile(diagram, beside)
        images.append(output / RELIABILITY)
    return images

"""`cait card`: collect what a run has written, and put a model card with its pictures into a folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from cait import ckpt, disk
from cait.cli.options import Options, check_folder, named_run
from cait.errors import UserError, one_line
from cait.run import rundir
from cait.run.program import Program

WHAT = """\
Write a model card of a run, README.md as the Hugging Face Hub shows it, with the figures of evaluation.json, the
settings, the curves and how to use the model."""
README = "README.md"


def card(arguments: list[str], program: Program) -> None:
    """Write the card of a run."""
    options = Options("card", WHAT)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--repo", default=None, metavar="OWNER/NAME", help="the model's name on the Hub")
    options.add_argument("--ema", action="store_true", help="the moving average instead of the raw weights")
    options.add_argument("--license", metavar="ID", help="the Hub's identifier, as apache-2.0; default none is named")
    options.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; default card/ in the run's")
    given = options.parse_args(arguments)
    folder = named_run("card", given.run)
    output = given.output or folder / "card"
    check_folder(output)
    if given.output and (output / README).exists():
        raise UserError(f"{output / README} exists; move it away or name another folder")
    repo = f"OWNER/{folder.name}" if given.repo is None else check_name(given.repo)
    try:
        written = write(folder, output, repo, given.ema, given.license, program)
    except OSError as error:
        raise UserError(f"cannot write the card to {output}: {error.strerror or error}") from error
    for path in written:
        print(os.path.relpath(path))


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


def write(folder: Path, output: Path, repo: str, ema: bool, license: str | None, program: Program) -> list[Path]:
    """Write the card of a run, with its images, into the folder `output`.

    Raises:
        UserError: the run was not scored, or its scores are of another step or data set.
    """
    from cait.data.folder import root_name
    from cait.extras.hub import card_text

    path = folder / rundir.EVALUATION
    about = _read(path, folder, program)
    scores = card_text.check(about, "ema" if ema else "raw", path)
    checkpoint = rundir.best_checkpoint(folder, "describe")
    content = ckpt.read_checkpoint(checkpoint, without=ckpt.TENSORS)
    if about["step"] != int(content["global_step"]):
        raise UserError(
            f"{path} is of step {about['step']}, {checkpoint} of step {content['global_step']}: "
            f"score it again with `{program.command('eval', folder)}`"
        )
    config = _config(folder)
    root = root_name(str(config["data"]["root"]))
    if about.get("root") != root:
        raise UserError(
            f"{path} is of {about.get('root')}, the run of {root}: "
            f"score it again with `{program.command('eval', folder)}`"
        )
    output.mkdir(parents=True, exist_ok=True)
    images = _images(folder, output)
    written = card_text.text(
        repo, scores, about, config, ckpt.data_state(content), [image.name for image in images], license
    )
    with disk.whole(output / README) as beside:
        beside.write_text(written, encoding="utf-8")
    return [output / README, *images]


def _read(path: Path, folder: Path, program: Program) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: `{program.command('eval', folder)}` writes it") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _config(folder: Path) -> dict[str, Any]:
    from cait.cli import saved

    config = saved.read(rundir.config(folder))
    if not isinstance(config.get("model"), dict) or "root" not in (config.get("data") or {}):
        raise UserError(f"{rundir.config(folder)} is not the configuration of a run")
    return config


def _images(folder: Path, output: Path) -> list[Path]:
    """Put the curves and the reliability diagram beside the card, where they exist."""
    from cait.extras import curves, plots
    from cait.extras.hub import card_text

    images = []
    try:
        plots.write(curves.draw({folder.name: curves.read(folder)}), output / card_text.CURVES)
        images.append(output / card_text.CURVES)
    except UserError as error:
        print(f"without curves: {error}")
    diagram = (folder / rundir.EVALUATION).with_name(f"{Path(rundir.EVALUATION).stem}-{card_text.RELIABILITY}")
    if diagram.is_file():
        shutil.copyfile(diagram, output / card_text.RELIABILITY)
        images.append(output / card_text.RELIABILITY)
    return images

"""`cait push`: export a run, write its card, and put both on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from cait import disk, plugins
from cait.cli.options import Options, named_run
from cait.errors import UserError, one_line
from cait.extras.hub.card import add_content, write
from cait.run.program import Program

WHAT = """\
Put the best network of a run on the Hugging Face Hub in timm's layout, with its model card. Then
timm.create_model("hf_hub:OWNER/NAME", pretrained=True) loads it."""


def push(arguments: list[str], program: Program) -> None:
    """Export a run, write its card, and put both on the Hub."""
    options = Options("push", WHAT)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("repo", metavar="OWNER/NAME", nargs="?", help="the model's name on the Hub; made if missing")
    options.add_argument("--dry-run", "--dry_run", action="store_true", help="show what would go, and send nothing")
    options.add_argument("--private", action="store_true", help="only you, or your organisation, may see it")
    add_content(options)
    options.add_trust()
    given = options.parse_args(arguments)
    folder, repo = named_run("push", given.run), given.repo or ""
    if repo.count("/") != 1:
        raise UserError("where to? name the model as OWNER/NAME: `cait push RUN OWNER/NAME`")
    stage = folder / "hub"
    disk.remove(stage)
    write(folder, stage, repo, given.ema, given.license, program)
    _export(folder, stage, given, program)
    for path in sorted(stage.iterdir()):
        print(f"{os.path.relpath(path)}  {decimal(path.stat().st_size)}")
    from huggingface_hub import HfApi

    api = HfApi(library_name="cait-lightning")
    if given.dry_run:
        print(f"nothing was sent; without --dry-run these files go to {api.endpoint}/{repo}")
    else:
        _send(api, stage, repo, given.private)
        print(f"{api.endpoint}/{repo}")


def _export(folder: Path, stage: Path, given: argparse.Namespace, program: Program) -> None:
    """Put timm's files of the run's best network into the folder `stage`."""
    export = plugins.merged("VERBS").get("export")
    if export is None:
        raise UserError("publishing needs timm's files, which no extra of this copy writes")
    weights = {None: [], True: ["--ema"], False: ["--raw"]}[given.ema]
    trust = ["--trust-config"] if given.trusted else []
    with contextlib.redirect_stdout(io.StringIO()):  # the files are listed with all others
        export.load()([str(folder), "--format=timm", f"--output={stage}", *weights, *trust], program)


def _send(api: Any, stage: Path, repo: str, private: bool) -> None:
    """Make the repository, if it is missing, and commit all files at once.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise UserError("it is there already and is public; make it private on its page")
        api.upload_folder(repo_id=repo, folder_path=stage, commit_message="Upload model")
    except Exception as error:  # also of whichever HTTP library the Hub's client uses
        reason = one_line(getattr(error, "server_message", None) or error) or type(error).__name__
        login = "`hf auth login`, or HF_TOKEN, gives a token that may write"
        raise UserError(f"{api.endpoint} has not taken {repo}: {reason}; {login}") from error

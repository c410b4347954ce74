"""`cait push`: export a run, write its card, and put both on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from cait import disk, plugins
from cait.cli.options import Options, named_run
from cait.errors import UserError, one_line
from cait.extras.hub.card import README, add_content, write
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
    options.add_argument("--card", type=Path, metavar="FILE", help="a card of your own in the place of the one written")
    add_content(options)
    options.add_trust()
    given = options.parse_args(arguments)
    folder, repo = named_run("push", given.run), given.repo or ""
    if repo.count("/") != 1:
        raise UserError("where to? name the model as OWNER/NAME: `cait push RUN OWNER/NAME`")
    card = disk.read_text(given.card) if given.card else None  # read first: it may lie in the folder that is made anew
    stage = folder / "hub"
    disk.check_output(stage, folder=True)
    disk.remove(stage)
    _stage(folder, stage, repo, card, given, program)
    for path in sorted(stage.iterdir()):
        print(f"{os.path.relpath(path)}  {decimal(path.stat().st_size)}")
    from huggingface_hub import HfApi

    api = HfApi(library_name="cait-lightning")
    url = f"{api.endpoint}/{repo}"
    if given.dry_run:
        how = "private" if given.private else "public if it is new"
        print(f"nothing was sent; without --dry-run these files go to {url} ({how})")
    else:
        print(f"{url} ({'private' if _send(api, stage, repo, given.private) else 'public'})")


def _stage(folder: Path, stage: Path, repo: str, card: str | None, given: Any, program: Program) -> None:
    """Put the files to upload into the folder `stage`; the text `card` replaces the written card."""
    export = plugins.merged("VERBS").get("export")
    if export is None:
        raise UserError("publishing needs timm's files, which no extra of this copy writes")
    write(folder, stage, repo, given.ema, given.license, program)  # first: it refuses a run that was not scored
    if card is not None:
        (stage / README).write_text(card, encoding="utf-8")
    weights = {None: [], True: ["--ema"], False: ["--raw"]}[given.ema]
    trust = ["--trust-config"] if given.trusted else []
    with contextlib.redirect_stdout(io.StringIO()):  # the files are listed with all others
        export.load()([str(folder), "--format=timm", f"--output={stage}", *weights, *trust], program)


def _send(api: Any, stage: Path, repo: str, private: bool) -> bool:
    """Make the repository and commit all files at once. Returns whether it is private; an existing one stays as it is.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.model_info(repo).private)
        if private and not is_private:
            raise UserError(f"{repo} is there already and is public: make it private on its page, or name another")
        api.upload_folder(repo_id=repo, folder_path=stage, commit_message="Upload model")
        return is_private
    except UserError:
        raise
    except Exception as error:  # also of whichever HTTP library the Hub's client uses
        reason = one_line(getattr(error, "server_message", None) or error) or type(error).__name__
        login = "`hf auth login`, or HF_TOKEN, gives a token that may write"
        raise UserError(f"{api.endpoint} has not taken {repo}: {reason}; {login}") from error

"""`cait push`: export a run, write its card, and put both on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from cait import disk, plugins
from cait.cli.options import Options, named_run
from cait.errors import UserError, one_line
from cait.extras.hub.card import README, add_content, check_name, write
from cait.run.program import Program

WHAT = """\
Put the best network of a run on the Hugging Face Hub in timm's layout, with its model card. Then
timm.create_model("hf_hub:OWNER/NAME", pretrained=True) loads it."""
TOKEN = "`hf auth login`, or HF_TOKEN, gives one that may write"


def push(arguments: list[str], program: Program) -> None:
    """Export a run, write its card, and put both on the Hub."""
    given = _options().parse_args(arguments)
    folder = named_run("push", given.run)
    repo = check_name(given.repo)
    from huggingface_hub import HfApi, get_token

    if not given.dry_run and get_token() is None:
        raise UserError(f"there is no Hugging Face token: {TOKEN}; --dry-run needs none")
    api = HfApi(library_name="cait-lightning")
    card = disk.read_text(given.card) if given.card else None  # read first: it may lie in the folder that is made anew
    stage = folder / "hub"
    disk.check_output(stage, folder=True)
    disk.remove(stage)
    _stage(folder, stage, repo, card, given, program)
    sizes = {os.path.relpath(path): path.stat().st_size for path in sorted(stage.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        shown = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
        print(f"{path:<{max(map(len, sizes))}}  {shown}")
    url = f"{api.endpoint}/{repo}"
    if given.dry_run:
        how = "private" if given.private else "public if it is new"
        print(f"nothing was sent; without --dry-run these files go to {url} ({how})")
        return
    private = _send(api, stage, repo, given.private)
    print(f"{url} ({'private' if private else 'public'})")


def _options() -> Options:
    options = Options("push", WHAT)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("repo", metavar="OWNER/NAME", nargs="?", help="the model's name on the Hub; made if missing")
    options.add_argument("--dry-run", "--dry_run", action="store_true", help="show what would go, and send nothing")
    options.add_argument("--private", action="store_true", help="only you, or your organisation, may see it")
    options.add_argument("--card", type=Path, metavar="FILE", help="a card of your own in the place of the one written")
    add_content(options)
    options.add_trust()
    return options


def _stage(folder: Path, stage: Path, repo: str, card: str | None, given: Any, program: Program) -> None:
    """Put the files to upload into the folder `stage`; the text `card` replaces the written card."""
    verbs = plugins.merged("VERBS")
    if "export" not in verbs:
        raise UserError("publishing needs timm's files, which no extra of this copy writes")
    write(folder, stage, repo, given.ema, given.license, program)  # first: it refuses a run that was not scored
    if card is not None:
        (stage / README).write_text(card, encoding="utf-8")
    weights = {None: [], True: ["--ema"], False: ["--raw"]}[given.ema]
    options = weights + ["--trust-config"] * given.trusted
    with contextlib.redirect_stdout(io.StringIO()):  # the files are listed with all others
        verbs["export"].load()([str(folder), "--format=timm", f"--output={stage}", *options], program)


def _send(api: Any, stage: Path, repo: str, private: bool) -> bool:
    """Make the repository and commit all files at once. Returns whether it is private; an existing one stays as it is.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.model_info(repo).private)
        if private and not is_private:
            raise UserError(f"{repo} is there already and is public: make it private on its page, or name another")
        api.upload_folder(repo_id=repo, folder_path=stage, commit_message="Upload model")
        return is_private
    except HfHubHTTPError as error:
        reasons = {
            401: f"the Hub does not know this Hugging Face token: {TOKEN}",
            403: f"this Hugging Face token may not write to {repo}: {TOKEN}",
        }
        status, message = error.response.status_code, one_line(error.server_message or error)
        raise UserError(reasons.get(status, f"the Hub answered {status} for {repo}: {message}")) from error
    except UserError:
        raise
    except ValueError as error:  # such as a license that it does not know
        raise UserError(f"the Hub refuses the upload: {one_line(error)}") from error
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        raise UserError(f"cannot reach {api.endpoint}: {one_line(error) or type(error).__name__}") from error

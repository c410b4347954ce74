"""`cait push`: export a run, write its card, and put both on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from cait import ckpt, disk
from cait.cli.options import Options, named_run
from cait.errors import UserError, one_line
from cait.extras.hub.card import README, check_name, write
from cait.run import rundir
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
    token = _token() if not given.dry_run else None
    stage = folder / "hub"
    card = _given_card(given.card)  # read first: it may lie in the folder that is made anew
    disk.remove(stage)
    _stage(folder, stage, repo, card, given, program)
    files = sorted(path for path in stage.rglob("*") if path.is_file())
    for path in files:
        print(f"{os.path.relpath(path):<{max(len(os.path.relpath(each)) for each in files)}}  {_size(path)}")
    url = f"{_endpoint()}/{repo}"
    if given.dry_run:
        how = "private" if given.private else "public if it is new"
        print(f"nothing was sent; without --dry-run these files go to {url} ({how})")
        return
    private = _send(stage, repo, given.private, token)
    print(f"{url} ({'private' if private else 'public'})")


def _options() -> Options:
    options = Options("push", WHAT)
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("repo", metavar="OWNER/NAME", nargs="?", help="the model's name on the Hub; made if missing")
    options.add_argument("--dry-run", "--dry_run", action="store_true", help="show what would go, and send nothing")
    options.add_argument("--private", action="store_true", help="only you, or your organisation, may see it")
    options.add_argument("--ema", action="store_true", help="the moving average instead of the raw weights")
    options.add_argument("--license", metavar="ID", help="the Hub's identifier, as apache-2.0; default none is named")
    options.add_argument("--card", type=Path, metavar="FILE", help="a card of your own in the place of the one written")
    options.add_trust()
    return options


def _token() -> str:
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise UserError(f"there is no Hugging Face token: {TOKEN}; --dry-run needs none")
    return token


def _given_card(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the card {path}: {error.strerror}") from error


def _stage(folder: Path, stage: Path, repo: str, card: bytes | None, given: Any, program: Program) -> None:
    """Put the files to upload into the folder `stage`; the bytes `card` replace the written card."""
    from cait.cli.export import export

    write(folder, stage, repo, given.ema, given.license, program)  # first: it refuses a run that was not scored
    if card is not None:
        (stage / README).write_bytes(card)
    options = ["--ema"] * given.ema + ["--trust-config"] * given.trusted
    with contextlib.redirect_stdout(io.StringIO()):  # the files are listed with all others
        export([str(folder), "--format=timm", f"--output={stage}", *options], program)
    config = stage / "config.json"
    content = json.loads(config.read_text())
    if "label_names" not in content:
        checkpoint = ckpt.read_checkpoint(rundir.best_checkpoint(folder, "push"), without=ckpt.TENSORS)
        content["label_names"] = ckpt.class_names(checkpoint)
        config.write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def _send(stage: Path, repo: str, private: bool, token: str | None) -> bool:
    """Make the repository and commit all files at once. Returns whether it is private; an existing one stays as it is.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=_endpoint(), token=token, library_name="cait-lightning")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.model_info(repo).private)
        if private and not is_private:
            raise UserError(f"{repo} is there already and is public: make it private on its page, or name another")
        api.upload_folder(repo_id=repo, folder_path=stage, commit_message="Upload model")
        return is_private
    except HfHubHTTPError as error:
        raise UserError(_refusal(repo, error)) from error
    except UserError:
        raise
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        raise UserError(f"cannot reach {_endpoint()}: {one_line(error) or type(error).__name__}") from error


def _refusal(repo: str, error: Any) -> str:
    """What the Hub's answer means."""
    status = error.response.status_code
    if status == 401:
        return f"the Hub does not know this Hugging Face token: {TOKEN}"
    if status == 403:
        return f"this Hugging Face token may not write to {repo}: {TOKEN}"
    return f"the Hub answered {status} for {repo}: {one_line(error.server_message or error)}"


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"

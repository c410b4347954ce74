"""`cait new`: copies `cait/project`, a whole small project, under another name."""

import json
import keyword
import os
import re
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import cait
from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program

PROJECT = Path(cait.__file__).parent / "project"
"""A project that works, called `EXAMPLE`."""
EXAMPLE = "leafnet"
PACKAGE = "cait-lightning"
"""The name of this package in an index, on which `PROJECT` depends."""


def new(arguments: list[str], program: Program) -> None:
    """Write a project of the user's own."""
    options = Options(
        "new",
        "Write a folder NAME: a project with a network, a loss, data and a configuration of its own, "
        "which depends on this package. It trains on the embedded digits at once.",
    )
    options.add_argument("name", metavar="NAME", help="of the folder and of the Python package")
    options.add_argument(
        "--into", metavar="DIR", type=Path, default=Path(), help="default: the working folder"
    )
    args = options.parse_args(arguments)
    check_name(args.name)
    folder = args.into / args.name
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists: give another name, or --into another folder")
    if not args.into.is_dir():
        raise UserError(f"--into {args.into}: there is no such folder")
    requirement = engine()
    # whole or not at all
    with tempfile.TemporaryDirectory(prefix=".new-", dir=args.into) as beside:
        scratch = Path(beside) / args.name
        write(scratch, args.name, requirement)
        os.rename(scratch, folder)
    print(f"{folder} depends on {requirement}. Next:\n  cd {folder}\n  make train\n  make test")


def check_name(name: str) -> None:
    """Raise UserError if a package cannot be called that."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot be a package's name: take small letters, digits and _, a letter first"
        )
    spec = find_spec(name)
    is_module = spec is not None and spec.origin is not None
    if is_module or (PROJECT / name).exists():
        raise UserError(f"{name} would hide another package or folder of this name: take another")


def engine() -> str:
    """What the project depends on: this package, from where it was installed."""
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:  # this source is only on Python's path
        return f"{PACKAGE} @ {cait.CONFIGS.parent.as_uri()}"
    return requirement_of(installed)


def requirement_of(installed: Distribution) -> str:
    """The requirement that installs a distribution again, by `direct_url.json` (PEP 610)."""
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if not source:
        return f"{PACKAGE} ~= {installed.version}"
    url = source["url"]
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return f"{PACKAGE} @ {url}"


def write(folder: Path, name: str, requirement: str) -> None:
    """Write the project into a new folder."""
    for path in sorted(PROJECT.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        relative = path.relative_to(PROJECT).as_posix()
        text = path.read_text().replace(EXAMPLE, name)
        if relative == "pyproject.toml":
            text = text.replace(
                f'dependencies = ["{PACKAGE}"]', f'dependencies = ["{requirement}"]'
            )
        target = folder / relative.replace(EXAMPLE, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

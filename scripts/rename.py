#!/usr/bin/env python3
"""Give the package a name of your own: `scripts/rename.py mypackage`, or `make rename NAME=mypackage`.

It renames the folder in src/ and every mention of it: imports, dotted names in strings and YAML, paths, the command
and its messages, the entry points, variables of the environment, documentation and tests. Names of the network stay:
the class CaiT, the file model/cait.py, timm's models. It needs Python alone.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LEFT_OUT = {".git", ".venv", "data", "logs", "dist"}
"""Folders of the repository that are not looked into where git does not list the files."""
KEPT = "scripts/rename.py leaves it"
"""A line that says so is left as it is."""
NO_PACKAGE = re.compile(r"(\.|\bmodels?/|\bmodels?(\.\w+)* import (\w+, )*)$")
"""What precedes the old name where it is a module or an attribute in something else, as in model/cait.py."""


def files(root: Path) -> list[Path]:
    """The files of the repository, without what git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
        found = [root / name for name in os.fsdecode(listed).split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # no git, or an archive of the repository
        found = [path for path in root.rglob("*") if path.relative_to(root).parts[0] not in LEFT_OUT]
    return sorted(path for path in set(found) if path.is_file() and not path.is_symlink())


def renamed(text: str, old: str, new: str, project: tuple[str, str]) -> str:
    """`text` with the package's new name, and the project's."""
    # Before the name there may be \b or \n of a pattern or a string.
    start = r"(?:(?<!\w)|(?<=\\[bnt]))"
    word = re.compile(rf"(?<!\w){re.escape(project[0])}(?!\w)|{start}{old}(?!\w)")

    def replace(found: re.Match[str]) -> str:
        if found[0] != old:
            return project[1]
        return old if NO_PACKAGE.search(found.string[: found.start()]) else new

    lines = []
    for line in text.splitlines(keepends=True):
        if KEPT not in line:
            line = re.sub(rf"(?<![A-Z_]){old.upper()}_(?=[A-Z])", f"{new.upper()}_", word.sub(replace, line))
        lines.append(line)
    return "".join(lines)


def check(name: str, root: Path) -> None:
    """Raise SystemExit if a package cannot have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(f"rename: {name!r} is no name for a package: small letters, digits and _, a letter first")
    pinned = root / "constraints-dev.txt"
    pins = pinned.read_text() if pinned.is_file() else ""
    if name in sys.stdlib_module_names or re.search(rf"^{name.replace('_', '[-_]')}==", pins, re.MULTILINE):
        raise SystemExit(f"rename: {name} is a package that others bring; imports would find the wrong one")
    if (root / "src" / name).exists():
        raise SystemExit(f"rename: src/{name} is there already")


def style(root: Path) -> None:
    """Sort the imports and break the lines anew if ruff is there; allow the lines that cannot be broken."""
    in_environment, settings = root / ".venv/bin/ruff", root / "pyproject.toml"
    ruff = str(in_environment) if in_environment.exists() else shutil.which("ruff")
    if ruff is None:
        print("rename: no ruff here; `make lint` may ask for imports in another order")
        return
    quiet = ["--no-cache", "--quiet", "."]
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        subprocess.run([ruff, *command, *quiet], cwd=root, check=False)
    if subprocess.run([ruff, "check", "--select", "E501", *quiet], cwd=root, capture_output=True).returncode:
        text, note = settings.read_text(), "# sentences with the package's name, which nothing breaks"
        settings.write_text(text.replace("\nignore = [\n", f'\nignore = [\n    "E501",    {note}\n', 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="of the package, as `import name` has it, and of its command")
    parser.add_argument("--project", help="name of the distribution in pyproject.toml; without it that stays")
    given = parser.parse_args()
    packages = [path.parent.name for path in (REPO / "src").glob("*/__init__.py")]
    if len(packages) != 1:
        raise SystemExit(f"rename: src/ must hold one package, it holds {', '.join(sorted(packages)) or 'none'}")
    old, new = packages[0], given.name
    check(new, REPO)
    before = re.search(r'^name = "([\w.-]+)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert before is not None
    project = (before[1], given.project or before[1])
    changed = 0
    for path in files(REPO):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:  # an image or a checkpoint
            continue
        if (written := renamed(text, old, new, project)) != text:
            path.write_bytes(written.encode())
            changed += 1
    for compiled in (REPO / "src" / old).rglob("__pycache__"):
        shutil.rmtree(compiled)
    (REPO / "src" / old).rename(REPO / "src" / new)
    style(REPO)
    print(f"{old} is {new} now, in {changed} files. `make test` sets it up again and tests it; look at `git diff`.")


if __name__ == "__main__":
    main()

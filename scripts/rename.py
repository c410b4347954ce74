#!/usr/bin/env python3
"""Give the package a name of your own: `scripts/rename.py mypackage`, or `make rename NAME=mypackage`.

It renames the folder in src/, the project, Lightning's three classes (MypackageModule ...) and every mention of them:
imports, dotted names in strings and YAML, paths, the command and its messages, the entry points, variables of the
environment, documentation and tests. Names of the network stay: the class CaiT, the files model/cait.py and
docs/cait.md, timm's models. It needs Python alone.
"""

import argparse
import ast
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
NO_PACKAGE = re.compile(r"\bmodels?([./]|(\.\w+)* import (\w+, )*)$")
"""What precedes the old name where it is a module or an attribute in something else, as in model/cait.py."""
OF_LIGHTNING = re.compile(r"^class (\w+?)((?:Data)?Module|CLI)\(Lightning", re.MULTILINE)


def files(root: Path) -> list[Path]:
    """The files of the repository, without what git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
        found = [root / name for name in os.fsdecode(listed).split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # no git, or an archive of the repository
        found = [
            path for path in root.rglob("*") if path.relative_to(root).parts[0] not in LEFT_OUT
        ]
    return sorted(path for path in set(found) if path.is_file() and not path.is_symlink())


def rules(root: Path, old: str, new: str) -> list[tuple[re.Pattern[str], str]]:
    """What is replaced, and by what."""
    source, title = root / "src" / old, titled(new)
    named = re.search(r'^name = "([\w.-]+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert named is not None
    found = {named[1]: new.replace("_", "-")}
    for path in source.rglob("*.py"):
        found |= {
            kind[1] + kind[2]: title + kind[2] for kind in OF_LIGHTNING.finditer(path.read_text())
        }
    names = [(re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), by) for name, by in found.items()]
    # but timm's class
    names.append((re.compile(rf"(?<!\.cait import )(?<!return )\b{old.title()}\b"), title))
    return [*names, (re.compile(rf"(?<![A-Z_]){old.upper()}_(?=[A-Z])"), f"{new.upper()}_")]


def renamed(text: str, old: str, new: str, more: list[tuple[re.Pattern[str], str]]) -> str:
    """`text` with the package's new name, and with `rules`."""
    for pattern, by in more:
        text = pattern.sub(by, text)

    def replace(found: re.Match[str]) -> str:
        before = text[max(0, found.start() - 80) : found.start()]
        return old if NO_PACKAGE.search(before) else new

    # Before the name there may be \\b or \\n of a pattern or a string, behind it the ending of a page.
    return re.sub(rf"(?:(?<!\w)|(?<=\\[bnt])){old}(?!\w|\.(?:py|md|ipynb)\b)", replace, text)


def package(root: Path) -> Path:
    """The folder in src/."""
    return next((root / "src").glob("*/__init__.py")).parent


def titled(name: str) -> str:
    """The name in classes."""
    return name.title().replace("_", "")


def check(name: str, root: Path) -> None:
    """Raise SystemExit if a package cannot have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(
            f"rename: {name!r} is no name for a package: small letters, digits and _, a letter first"
        )
    pinned = root / "constraints-dev.txt"
    pins = pinned.read_text() if pinned.is_file() else ""
    if name in sys.stdlib_module_names or re.search(
        rf"^{name.replace('_', '[-_]')}==", pins, re.MULTILINE
    ):
        raise SystemExit(
            f"rename: {name} is a package that others bring; imports would find the wrong one"
        )
    if (root / "src" / name).exists():
        raise SystemExit(f"rename: src/{name} is there already")
    if hidden := next(
        (path for path in files(root) if path.suffix == ".py" and hides(path, root, name)), None
    ):
        raise SystemExit(
            f"rename: {hidden.relative_to(root)} has a variable {name}, which would hide the package"
        )


def hides(path: Path, root: Path, new: str) -> bool:
    """Whether a file that speaks of the package, as in `cait.load`, uses its new name for something else."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    old = package(root).name
    return {old, new} <= names or {titled(old), titled(new)} <= names


def style(root: Path) -> None:
    """Sort the imports and break the lines anew if ruff is there; allow the lines that cannot be broken."""
    in_environment, settings = root / ".venv/bin/ruff", root / "pyproject.toml"
    ruff = str(in_environment) if in_environment.exists() else shutil.which("ruff")
    if ruff is None:
        print("rename: no ruff here; `make lint` may ask for imports in another order")
        return
    quiet = ["--no-cache", "--quiet", "."]
    for command in (["check", "--fix", "--select", "I,RUF022"], ["format"]):
        subprocess.run([ruff, *command, *quiet], cwd=root, check=False)
    if subprocess.run(
        [ruff, "check", "--select", "E501", *quiet], cwd=root, capture_output=True
    ).returncode:
        text, note = (
            settings.read_text(),
            "# sentences with the package's name, which nothing breaks",
        )
        settings.write_text(
            text.replace("\nignore = [\n", f'\nignore = [\n    "E501",    {note}\n', 1)
        )


def rename(root: Path, new: str) -> str:
    """Rename the package in `root`; returns a sentence about it."""
    source = package(root)
    old, changed = source.name, 0
    more = rules(root, old, new)
    for path in files(root):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:  # an image or a checkpoint
            continue
        if (written := renamed(text, old, new, more)) != text:
            path.write_bytes(written.encode())
            changed += 1
    for compiled in source.rglob("__pycache__"):
        shutil.rmtree(compiled)
    source.rename(source.with_name(new))
    style(root)
    return f"{old} is {new} now, in {changed} files."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "name", help="of the package, as `import name` has it, of its command and of the project"
    )
    name = parser.parse_args().name
    check(name, REPO)
    print(rename(REPO, name), "`make test` sets it up again and tests it; look at `git diff`.")


if __name__ == "__main__":
    main()

"""`scripts/rename.py` gives a copy of the repository a package of another name, and the copy works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LIMIT, REPO

pytestmark = pytest.mark.slow

PACKAGE = next((REPO / "src").glob("*/__init__.py")).parent.name  # this file is renamed too
NEW = "own_package"
# What may keep the old name: a file of the network's or of timm's, a value in checkpoints.
STAYS = re.compile(
    rf"(\.|\bmodels?/|\bmodels?(\.\w+)* import (\w+, )*){PACKAGE}\b|({PACKAGE}-lightning|is_{PACKAGE})\b"
    "|.*rename.py leaves it$"
)
OLD = re.compile(rf"(?<![^\W_]){PACKAGE}(?!\w)|\\[bnt]{PACKAGE}(?!\w)|{PACKAGE.upper()}_[A-Z]")


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """What a command prints in a copy, with the copy's package to import."""
    paths = os.pathsep.join(str(folder / name) for name in ("src", "tests/support"))
    env = os.environ | {"PYTHONPATH": paths, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=6 * LIMIT
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def copied(folder: Path) -> Path:
    """The repository without what git ignores, which lists nothing in it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, capture_output=True)
    if listed.returncode:
        pytest.skip("the files of the repository are listed by git, and this is no checkout")
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (REPO / name).is_file() and not (REPO / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(tmp_path_factory.mktemp("renamed"))
    assert f"{PACKAGE} is {NEW} now" in run(folder, sys.executable, "scripts/rename.py", NEW)
    return folder


def test_no_mention_of_the_old_name_is_left(copy: Path) -> None:
    assert not (copy / "src" / PACKAGE).exists()
    seen = 0
    for path in copy.rglob("*"):
        if not path.is_file() or path.suffix in (".ckpt", ".npy", ".png") or "__pycache__" in path.parts:
            continue
        for line in path.read_text().splitlines():
            seen += len(re.findall(rf"\b{NEW}\b", line))
            assert not OLD.search(STAYS.sub("", line)), f"{path}: {line}"
    assert seen > 1000
    assert "class CaiTModule(" in (copy / f"src/{NEW}/train/module.py").read_text()


def test_every_module_compiles_and_the_command_speaks(copy: Path) -> None:
    run(copy, sys.executable, "-m", "compileall", "-q", "src")
    assert f"usage: {NEW} VERB" in run(copy, sys.executable, "-m", NEW, "--help")
    assert f"usage: {NEW} eval" in run(copy, sys.executable, "-m", NEW, "eval", "--help")
    names = f"{NEW}.cli.lightning, {NEW}.cli.predict, {NEW}.model.cait"
    printed = run(copy, sys.executable, "-c", f"import {names}; print({NEW}.CaiTModule, {NEW}.plugins.GROUP)")
    assert printed == f"<class '{NEW}.train.module.CaiTModule'> {NEW}.extras\n"


def test_ruff_finds_nothing(copy: Path) -> None:
    assert "All checks passed" in run(copy, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(copy, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_the_package_is_built_with_its_command_and_without_tests(copy: Path, tmp_path: Path) -> None:
    code = f"import hatchling.build as b; print(b.build_wheel({str(tmp_path)!r}))"
    wheel = run(copy, sys.executable, "-c", code).split()[-1]
    listed = run(copy, sys.executable, "-m", "zipfile", "-l", str(tmp_path / wheel))
    assert f"{NEW}/cli/command.py" in listed
    assert f"{NEW}/extras/" in listed
    assert "/tests/" not in listed
    run(copy, sys.executable, "-m", "zipfile", "-e", str(tmp_path / wheel), str(tmp_path))
    (points,) = tmp_path.glob("*.dist-info/entry_points.txt")
    assert points.read_text() == f"[console_scripts]\n{NEW} = {NEW}.cli:main\n"


def test_a_name_that_others_bring_is_refused_before_anything_changes(copy: Path) -> None:
    before = (copy / "pyproject.toml").read_bytes()
    for name, said in (("torch", "others bring"), ("class", "no name"), (NEW, f"src/{NEW} is there already")):
        assert said in run(copy, sys.executable, "scripts/rename.py", name, status=1)
    assert (copy / "pyproject.toml").read_bytes() == before


def test_it_can_be_renamed_again_with_the_project(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    run(folder, sys.executable, "scripts/rename.py", NEW)
    run(folder, sys.executable, "scripts/rename.py", "second", "--project", "second-project")
    assert "usage: second VERB" in run(folder, sys.executable, "-m", "second", "--help")
    text = (folder / "pyproject.toml").read_text()
    assert 'name = "second-project"' in text
    assert '"second-project[' in text
    assert NEW not in text


def test_its_tests_pass(copy: Path) -> None:
    parts = ("tests/model", "tests/train", "tests/cli", "tests/house/test_house.py")
    assert " failed" not in run(copy, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *parts)

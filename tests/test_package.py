"""The wheel and the sdist: what is in them, and what an installed package does in an empty folder."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness import LIMIT, REPO

from cait.cli import main

SOURCE = next((REPO / "src").glob("*/__init__.py")).parent
OF_A_CLONE = re.compile(r"\bmake (train|[a-z-]+ [A-Z]+=)|`make |\b[A-Z]+=|\.venv/|--editable")
"""What a message must not tell somebody to type who has no clone."""

spec = importlib.util.spec_from_file_location("release", REPO / "scripts/release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """What a command prints in a folder, without this tree to import from."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def build(root: Path, kind: str, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of a tree, with the hatchling that is installed."""
    code = f"import hatchling.build as build; print(build.build_{kind}({str(folder)!r}))"
    return folder / run(root, sys.executable, "-c", code).split()[-1]


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    with tarfile.open(build(REPO, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return build(root, "wheel", folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel, and shows the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=LIMIT)
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site,) = folder.glob("lib/python*/site-packages")
    # Packages of a folder that a .pth file names are found, but not the editable ones that .pth files in it name.
    (site / "beside.pth").write_text("\n".join(sorted(paths)))
    pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
    run(folder, *pip, wheel)
    return folder / "bin" / SOURCE.name


def test_the_wheel_is_whole_and_the_sdist_builds_the_same(wheel: Path, tmp_path: Path) -> None:
    built = contents(wheel)
    assert built == contents(build(REPO, "wheel", tmp_path))
    kept = {path.relative_to(REPO): SOURCE.name / path.relative_to(REPO) for path in (REPO / "configs").rglob("*.yaml")}
    for path in SOURCE.rglob("*"):
        if path.is_file() and not {"tests", "__pycache__"} & {*path.relative_to(SOURCE).parts}:
            kept[path.relative_to(REPO)] = path.relative_to(SOURCE.parent)
    for_readers = {name for name in kept if name.suffix in (".md", ".png", ".mk")}
    found = {name for name in built if ".dist-info/" not in name}
    assert found == {str(kept[name]) for name in kept.keys() - for_readers}
    assert for_readers


def test_an_installed_package_finds_its_configurations_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = f"import {SOURCE.name} as package; print(package.CONFIGS)"
    found = run(tmp_path, installed.with_name("python"), "-c", where).strip()
    assert Path(found).is_relative_to(installed.parents[1].resolve())
    assert "`cait resume NAME`" in run(tmp_path, installed, "resume", status=2)
    (tmp_path / "own.yaml").write_text("model: {lrr: 1}\n")
    (tmp_path / "base.yaml").symlink_to("own.yaml")  # a file of one's own comes before the package's
    unknown = "there is no option --model.lrr; did you mean --model.lr?"  # only once the file was found and read
    missing = "--config {}: there is no such file; did you mean configs/{}?"
    told = {
        "digits.yaml": unknown,
        "configs/digits.yaml": unknown,
        "imagenet/xxs24_224.yaml": unknown,
        "digit.yaml": missing.format("digit.yaml", "digits.yaml"),
        "trainer/gpus.yaml": missing.format("trainer/gpus.yaml", "trainer/gpu.yaml"),
        "base.yaml": "base.yaml: there is no setting model.lrr; did you mean --model.lr?",
    }
    more = [["--model.lrr=1"] if line == unknown else [] for line in told.values()]
    code = (
        f"import contextlib; from {SOURCE.name}.cli import main\n"
        f"for words in {[['fit', '--config', name, *end] for name, end in zip(told, more, strict=True)]}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)"
    )
    lines = run(tmp_path, installed.with_name("python"), "-c", code).splitlines()
    assert lines == [f"cait: error: {line}" for line in told.values()]


@pytest.mark.skipif(not (SOURCE / "extras/paper").exists(), reason="an extra, which may be removed")
def test_an_extra_finds_them_too_and_may_be_deleted(installed: Path, tmp_path: Path) -> None:
    assert "xxs24" in run(tmp_path, installed, "zoo")
    assert "train a row: cait fit --paper" in run(tmp_path, installed, "paper")
    (folder,) = installed.parents[1].glob("lib/python*/site-packages/*/extras/paper")
    folder.rename(tmp_path / "deleted")
    try:
        assert "unknown verb 'zoo'" in run(tmp_path, installed, "zoo", status=2)
    finally:
        (tmp_path / "deleted").rename(folder)


@pytest.mark.slow
def test_an_installed_package_trains_resumes_scores_and_predicts(installed: Path, tmp_path: Path) -> None:
    printed = run(tmp_path, REPO / "scripts/try_package.sh", installed)
    for words in ("name: xxs24", "top-1", "data/digits/val/7/0081.png"):
        assert words in printed
    assert not OF_A_CLONE.search(printed)
    assert not list(tmp_path.iterdir())


def test_a_clone_finds_a_configuration_from_any_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])

    def rate(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["fit", *arguments, "--print_config"])
        return re.search(r"^  lr: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]

    digits = rate("--config", str(REPO / "configs/digits.yaml"))
    assert digits == rate("--config=digits.yaml") == rate("-c", "configs/digits.yaml", "--config", "trainer/cpu.yaml")
    (tmp_path / "digits.yaml").write_text("model: {lr: 0.5}\n")
    assert rate("--config", "digits.yaml") == rate("--config=configs/digits.yaml", "--config=digits.yaml") == "0.5"
    assert rate("--config={model: {lr: 0.25}}") == "0.25"


def test_messages_name_make_only_in_a_clone() -> None:
    seen = 0
    for path in SOURCE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))] if "tests" not in path.parts else []
        asked = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "to_type"]
        docstrings = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        left_out = {id(inner) for node in (*asked, *docstrings) for inner in ast.walk(node)}
        seen += len(asked)
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                assert not OF_A_CLONE.search(node.value), f"{path}:{node.lineno}"
    assert seen > 10


def test_a_release_has_its_version_and_date_in_all_files(tmp_path: Path) -> None:
    files = ("CHANGELOG.md", "CITATION.cff", f"src/{SOURCE.name}/__init__.py")
    (tmp_path / files[2]).parent.mkdir(parents=True)
    for name in files:
        shutil.copy(REPO / name, tmp_path / name)
    version = release.found(tmp_path / files[2], r'^__version__ = "(.+)"$')
    notes = release.notes(tmp_path, f"v{version}")
    assert notes.startswith("### ")
    changelog = (REPO / "CHANGELOG.md").read_text()
    newer = "# Changelog\n\n## [9.0.0] - 2030-01-01\n\n### Added\n\n- More.\n\n"
    (tmp_path / "CHANGELOG.md").write_text(newer + changelog[changelog.index("## [") :] + "\n## [0.0.1] - 2020-01-01\n")
    assert release.notes(tmp_path, f"v{version}") == notes
    for tag, file, old, new, said in (
        ("v9.0.0", "CITATION.cff", "", "", f"the tag is v9.0.0, the version of {files[2]} is {version}"),
        (f"v{version}", "CITATION.cff", "date-released: 2", "date-released: 3", f"CITATION.cff has {version} of 3"),
        (f"v{version}", "CHANGELOG.md", f"[{version}] - 2", f"[{version}] - Unreleased 2", "CHANGELOG.md has no line"),
    ):
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text.replace(old, new))
        with pytest.raises(SystemExit, match=f"^release: .*{re.escape(said)}"):
            release.notes(tmp_path, tag)
        (tmp_path / file).write_text(text)

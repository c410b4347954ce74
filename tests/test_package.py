"""The wheel and the sdist: what is in them, and what an installed package does in an empty folder."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from harness import LIMIT, REPO

import cait
from cait.cli import main

SOURCE = next((REPO / "src").glob("*/__init__.py")).parent
OF_A_CLONE = re.compile(r"\bmake (train|[a-z-]+ [A-Z]+=)|`make |\b[A-Z]+=|\.venv/|--editable")
"""What an installed package must not tell somebody to type who has no clone."""


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """What a command prints in a folder, without this tree to import from."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "COLUMNS": "200"
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
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
    pip = (
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    )
    run(folder, *pip, wheel)
    return folder / "bin" / SOURCE.name


@pytest.mark.slow
def test_the_wheel_is_whole_and_the_sdist_builds_the_same(wheel: Path, tmp_path: Path) -> None:
    built = contents(wheel)
    assert built == contents(build(REPO, "wheel", tmp_path))
    kept = {
        path.relative_to(REPO): SOURCE.name / path.relative_to(REPO)
        for path in (REPO / "configs").rglob("*.yaml")
    }
    for path in SOURCE.parent.rglob("*"):
        parts = path.relative_to(SOURCE.parent).parts
        is_left_out = "__pycache__" in parts or ("tests" in parts and "project" not in parts)
        if path.is_file() and not is_left_out:
            kept[path.relative_to(REPO)] = path.relative_to(SOURCE.parent)
    for_readers = {
        name
        for name in kept
        if name.suffix in (".md", ".png", ".mk") and "project" not in name.parts
    }
    found = {name for name in built if ".dist-info/" not in name}
    assert found == {str(kept[name]) for name in kept.keys() - for_readers}


@pytest.mark.slow
def test_an_installed_package_finds_its_configurations_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    where = f"import {SOURCE.name} as package; print(package.CONFIGS)"
    found = run(tmp_path, installed.with_name("python"), "-c", where).strip()
    assert Path(found).is_relative_to(installed.parents[1].resolve())
    assert "`cait resume NAME`" in run(tmp_path, installed, "resume", status=2)
    unknown = run(tmp_path, installed, "fit", "--config", "digits.yaml", "--model.lrr=1", status=2)
    assert "there is no setting model.lrr" in unknown  # only once the file was found and read
    assert "there is no such file" in run(
        tmp_path, installed, "fit", "--config", "digit.yaml", status=2
    )


@pytest.mark.slow
def test_an_installed_package_trains_resumes_scores_and_predicts(
    installed: Path, tmp_path: Path
) -> None:
    printed = run(tmp_path, REPO / "scripts/try_package.sh", installed)
    for words in ("name: xxs24", "top-1", "data/digits/val/7/0081.png"):
        assert words in printed
    assert not OF_A_CLONE.search(printed)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_project_of_ones_own_lives_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`cait new` of an installed package, then the targets of its Makefile, with no clone in sight."""
    run(tmp_path, installed, "new", "maple")
    project = tmp_path / "maple"
    environment = installed.parents[1]
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "maple.pth").write_text(str(project / "src"))
    (project / ".venv").symlink_to(environment)
    (project / ".venv/ready").touch()
    short = "ARGS=--trainer.max_steps=4 --trainer.accelerator=cpu --save_every_n_steps=2"
    run(project, "make", "train", short)
    run(project, "make", "resume", "RUN=maple", "ARGS=--trainer.max_steps=8")
    assert "top-1" in run(project, "make", "eval", "RUN=maple")
    image = "IMAGES=data/digits/val/7/0081.png"
    printed = run(project, "make", "predict", "RUN=maple", image)
    assert "0081.png" in printed
    assert not OF_A_CLONE.search(printed)
    run(project, "make", "export", "RUN=maple")
    assert (project / "logs/maple/export").is_dir()
    assert "3 passed" in run(project, "make", "test")


@pytest.mark.slow
def test_contrib_is_a_package_to_install_beside_it(installed: Path, tmp_path: Path) -> None:
    """Its folders have the import paths of a clone, and nothing called contrib lies among other packages."""
    wheel = build(REPO / "contrib", "wheel", tmp_path)
    root = Path("cait_contrib/contrib")
    parts = {
        str(root / path.relative_to(REPO / "contrib"))
        for path in (REPO / "contrib").rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".js", ".css", ".svg")
        and "tests" not in path.parts
    }
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == parts
    assert "sweep" not in run(tmp_path, installed, "--help")
    pip = (installed.with_name("python"), "-m", "pip")
    run(tmp_path, *pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel)
    try:
        verbs = run(tmp_path, installed, "--help")
        for name in (
            "crossval",
            "demo",
            "heat-maps",
            "replay",
            "serve",
            "shards",
            "study",
            "sweep",
        ):
            assert f"  {name} " in verbs
        assert "usage: cait sweep" in run(tmp_path, installed, "sweep", "--help")
        small = ["--config=digits.yaml", "--model.fields.depth=2", "--data.num_workers=0"]
        short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
        folds = ["--data.folds=2", "--trainer.accelerator=cpu", "--trainer.devices=1"]
        watch = ["--trainer.callbacks+=contrib.monitor.callback.Monitor"]
        watch.append("--trainer.callbacks.every_n_steps=1")
        printed = run(tmp_path, installed, "crossval", "mine", *small, *short, *folds, *watch)
        assert "val/acc1" in printed
        assert not OF_A_CLONE.search(printed)
        assert (tmp_path / "logs/mine/fold-1/monitor.csv").is_file()
    finally:
        run(tmp_path, *pip, "uninstall", "--quiet", "--yes", "cait-lightning-contrib")


def test_contrib_is_of_the_version_of_this_package() -> None:
    project = tomllib.loads((REPO / "contrib/pyproject.toml").read_text())["project"]
    of_root = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    minor = cait.__version__.rpartition(".")[0]
    assert project["dependencies"] == [f"cait-lightning ~= {minor}.0"]
    for needed in project["optional-dependencies"].values():
        groups = [re.fullmatch(r"cait-lightning\[(\w+)\]", name) for name in needed]
        known = {*of_root["optional-dependencies"], *of_root["optional-dependencies"]["dev"]}
        assert {
            match[1] if match else name for match, name in zip(groups, needed, strict=True)
        } <= known


def test_a_clone_finds_a_configuration_from_any_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])

    def rate(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["fit", *arguments, "--print_config"])
        return re.search(r"^  lr: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]

    digits = rate("--config", str(REPO / "configs/digits.yaml"))
    assert (
        digits
        == rate("--config=digits.yaml")
        == rate("-c", "configs/digits.yaml", "--config", "trainer/cpu.yaml")
    )
    (tmp_path / "digits.yaml").write_text("model: {lr: 0.5}\n")
    assert (
        rate("--config", "digits.yaml")
        == rate("--config=configs/digits.yaml", "--config=digits.yaml")
        == "0.5"
    )

"""The wheel and the sdist: what is in them, and what an installed package does in an empty folder."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from harness import LIMIT, REPO, checkpoint
from runs import assert_same

import cait
from cait.cli import main

SOURCE = next((REPO / "src").glob("*/__init__.py")).parent
OF_A_CLONE = re.compile(r"\bmake (train|[a-z-]+ [A-Z]+=)|`make |\b[A-Z]+=|\.venv/|--editable")
"""What an installed package must not tell somebody to type who has no clone."""


def variables() -> dict[str, str]:
    """Those of a user who has no clone, and whose pip takes what is here."""
    # pip reads the 0 as it would read --no-build-isolation
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "COLUMNS": "200"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """What a command prints in a folder, without this tree to import from."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables(),
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
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sdist holds."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(REPO, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist."""
    return build(tree, "wheel", tmp_path_factory.mktemp("dist"))


def environment(folder: Path) -> Path:
    """An environment that shows the packages of this one."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=LIMIT
    )
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site,) = folder.glob("lib/python*/site-packages")
    # Packages of a folder that a .pth file names are found, but not the editable ones that .pth files in it name.
    (site / "beside.pth").write_text("\n".join(sorted(paths)))
    return folder


def install(wheel: Path, folder: Path) -> Path:
    """The command of an environment that has the wheel."""
    python = environment(folder) / "bin/python"
    run(folder, python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", wheel)
    return folder / "bin" / SOURCE.name


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


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


SHORT = "--trainer.accelerator=cpu --save_every_n_steps=2 --trainer.log_every_n_steps=1"


def begin(cait: Path, folder: Path) -> Path:
    """A new project, whose Makefile installs it."""
    run(folder, cait, "new", "maple")
    environment(folder / "maple/.venv")
    return folder / "maple"


def kill_once_saved(project: Path, name: str, *words: str) -> None:
    """Train, and kill all processes of the run when it has a checkpoint."""
    job = subprocess.Popen(
        ["make", "train", *words],
        cwd=project,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    saved = project / "logs" / name / "checkpoints/last.ckpt"
    end = time.monotonic() + LIMIT
    while not saved.exists() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == -signal.SIGKILL, printed


@pytest.mark.slow
def test_a_project_of_ones_own_lives_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`cait new` of an installed package, then the targets of its Makefile, with no clone in sight."""
    project = begin(installed, tmp_path)
    recipe = f"ARGS={SHORT} --trainer.max_steps=60 --run_name"
    run(project, "make", "train", f"{recipe} whole")
    kill_once_saved(project, "maple", f"{recipe} maple")
    assert "maple/checkpoints/last.ckpt" in run(project, "make", "resume")
    assert_same(project / "logs/maple", project / "logs/whole")
    assert "top-1" in run(project, "make", "eval")
    printed = run(project, "make", "predict", "IMAGES=data/digits/val/7/0081.png")
    assert "0081.png" in printed
    assert not OF_A_CLONE.search(printed)
    run(project, "make", "export")
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


def last_release() -> str:
    """The tag of the last release. Skips the test if there is none, or it has no `cait new` yet."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    tag = subprocess.run(describe, cwd=REPO, capture_output=True, text=True).stdout.strip()
    if not tag:
        pytest.skip("no release has a tag in this clone")
    new = ["git", "cat-file", "-e", f"{tag}:src/cait/project/Makefile"]
    if subprocess.run(new, cwd=REPO, capture_output=True).returncode:
        pytest.skip(f"{tag} has no `cait new`")
    return tag


@pytest.mark.slow
def test_a_project_of_the_last_release_goes_on_with_this_one(tree: Path, tmp_path: Path) -> None:
    """Its author raises the version, runs the tests, and resumes an older run."""
    archive = subprocess.run(["git", "archive", last_release()], cwd=REPO, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "release", filter="data")
    release = build(tmp_path / "release", "wheel", tmp_path / "release")
    project = begin(install(release, tmp_path / "environment"), tmp_path)
    run(project, "make", "train", f"ARGS={SHORT} --trainer.max_steps=8")

    newer = tmp_path / "newer"
    shutil.copytree(tree, newer, ignore=shutil.ignore_patterns("PKG-INFO"))  # it holds the version
    version = newer / "src" / SOURCE.name / "__init__.py"
    version.write_text(re.sub(r'(?<=__version__ = ")[^"]+', r"\g<0>.post1", version.read_text()))
    wheel = build(newer, "wheel", newer)
    settings = project / "pyproject.toml"
    text = settings.read_text()
    assert release.as_uri() in text
    settings.write_text(text.replace(release.as_uri(), wheel.as_uri()))
    assert "3 passed" in run(project, "make", "test")
    assert ".post1" in run(project, ".venv/bin/cait", "--version")
    run(project, "make", "resume", "ARGS=--trainer.max_steps=16")
    assert checkpoint(project / "logs/maple")["global_step"] == 16
    assert "top-1" in run(project, "make", "eval")


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

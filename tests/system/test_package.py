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
import tomllib
import zipfile

import pytest
from harness import LIMIT, REPO, checkpoint, rows
from runs import assert_same, wait_for_steps

import cait

SOURCE = next((REPO / "src").glob("*/__init__.py")).parent
OF_A_CLONE = re.compile(r"\bmake (train|[a-z-]+ [A-Z]+=)|`make |\b[A-Z]+=|\.venv/|--editable")
"""What an installed package must not tell somebody to type who has no clone."""


def variables():
    """Those of a user who has no clone, and whose pip takes what is here."""
    # pip reads the 0 as it would read --no-build-isolation
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "COLUMNS": "200"}
    variables = os.environ | offline
    variables.pop("PYTHONPATH", None)
    return variables


def start(folder, *command):
    """A command in a folder, without this tree to import from."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder, *command):
    """What it prints."""
    job = start(folder, *command)
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, printed
    return printed


def build(root, what, folder):
    """Build a "wheel" or an "sdist" of a tree, with the hatchling that is installed."""
    code = f"import hatchling.build as build; print(build.build_{what}({str(folder)!r}))"
    return folder / run(root, sys.executable, "-c", code).split()[-1]


def contents(wheel):
    """The checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def names(wheel):
    """The files of a wheel but those about the package."""
    return {name for name in contents(wheel) if ".dist-info/" not in name}


def below(root, folder):
    """The files in a folder, by their paths below a root."""
    return {str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What the sdist holds."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(REPO, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    [root] = (path for path in folder.iterdir() if path.is_dir())
    return root


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """A wheel that is built from the sdist."""
    return build(tree, "wheel", tmp_path_factory.mktemp("dist"))


def environment(folder):
    """An environment that shows the packages of this one; returns its Python."""
    run(folder.parent, sys.executable, "-m", "venv", "--without-pip", folder)
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    [site] = folder.glob("lib/python*/site-packages")
    # Packages of a folder that a .pth file names are found, but not the editable ones that .pth files in it name.
    (site / "beside.pth").write_text("\n".join(sorted(paths)))
    return folder / "bin/python"


def pip(python, *words):
    run(python.parent, python, "-m", "pip", *words, "--quiet")


def install(wheel, folder):
    """The command of an environment that has the wheel."""
    python = environment(folder)
    pip(python, "install", "--no-deps", "--no-compile", wheel)
    return python.with_name(SOURCE.name)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("environment"))


NOT_SHIPPED = re.compile(r"__pycache__|^(?!.*/project/).*(/tests/|\.(md|png|mk)$)")
"""Of the files of the source; but what a project of one's own starts with belongs to the package."""


@pytest.mark.slow
def test_the_wheel_is_whole_and_the_sdist_builds_the_same(wheel, tmp_path):
    assert contents(wheel) == contents(build(REPO, "wheel", tmp_path))
    source = {name for name in below(REPO / "src", REPO / "src") if not NOT_SHIPPED.search(name)}
    configs = {f"{SOURCE.name}/{name}" for name in below(REPO, REPO / "configs")}
    assert names(wheel) == source | configs


@pytest.mark.slow
def test_an_installed_package_trains_resumes_scores_and_predicts(installed, tmp_path):
    printed = run(tmp_path, REPO / "scripts/try_package.sh", installed)
    for words in ("name: xxs24", "top-1", "data/digits/val/7/0081.png"):
        assert words in printed
    assert not OF_A_CLONE.search(printed)
    assert not list(tmp_path.iterdir())


SHORT = "--trainer.accelerator=cpu --save_every_n_steps=2 --trainer.log_every_n_steps=1"


def begin(cait, folder):
    """A new project, whose Makefile installs it."""
    run(folder, cait, "new", "maple")
    environment(folder / "maple/.venv")
    return folder / "maple"


@pytest.mark.slow
def test_a_project_of_ones_own_lives_on_the_wheel(installed, tmp_path):
    """`cait new` of an installed package, then the targets of its Makefile, with no clone in sight."""
    project = begin(installed, tmp_path)
    recipe = f"ARGS={SHORT} --trainer.max_steps=60 --run_name"
    run(project, "make", "train", f"{recipe} whole")
    job = start(project, "make", "train", f"{recipe} maple")
    wait_for_steps(project / "logs/maple", 4, job)
    os.killpg(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert len(rows(project / "logs/maple")) < 60
    assert "maple/checkpoints/last.ckpt" in run(project, "make", "resume")
    assert_same(project / "logs/maple", project / "logs/whole")
    assert "top-1" in run(project, "make", "eval")
    printed = run(project, "make", "predict", "IMAGES=data/digits/val/7/0081.png")
    assert "0081.png" in printed
    assert not OF_A_CLONE.search(printed)
    run(project, "make", "export")
    assert (project / "logs/maple/export").is_dir()
    assert "3 passed" in run(project, "make", "test")


SHIPPED = re.compile(r"(?!.*/tests/).*\.(py|yaml|html|js|css|svg)$")
"""Of the files of contrib."""
VERBS = "crossval demo heat-maps replay serve shards study sweep"


@pytest.mark.slow
def test_contrib_is_a_package_to_install_beside_it(installed, tmp_path):
    """Its folders have the import paths of a clone, and nothing called contrib lies among other packages."""
    wheel = build(REPO / "contrib", "wheel", tmp_path)
    files = below(REPO, REPO / "contrib")
    assert names(wheel) == {f"cait_contrib/{name}" for name in files if SHIPPED.match(name)}
    assert "sweep" not in run(tmp_path, installed, "--help")
    python = installed.with_name("python")
    pip(python, "install", "--no-deps", "--no-compile", wheel)
    try:
        verbs = run(tmp_path, installed, "--help")
        for name in VERBS.split():
            assert f"  {name} " in verbs
        assert "usage: cait sweep" in run(tmp_path, installed, "sweep", "--help")
        words = (
            "--config=digits.yaml --model.fields.depth=2 --data.num_workers=0 --data.folds=2 "
            "--trainer.max_epochs=1 --trainer.limit_train_batches=2 --trainer.accelerator=cpu "
            "--trainer.devices=1 --trainer.callbacks+=contrib.monitor.callback.Monitor "
            "--trainer.callbacks.every_n_steps=1"
        )
        printed = run(tmp_path, installed, "crossval", "mine", *words.split())
        assert "val/acc1" in printed
        assert not OF_A_CLONE.search(printed)
        assert (tmp_path / "logs/mine/fold-1/monitor.csv").is_file()
    finally:
        pip(python, "uninstall", "--yes", "cait-lightning-contrib")


def test_contrib_needs_this_version_and_what_this_package_names():
    own, contrib = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (REPO, REPO / "contrib")
    )
    major, minor, _ = cait.__version__.split(".")
    assert contrib["dependencies"] == [f"cait-lightning ~= {major}.{minor}.0"]
    groups = own["optional-dependencies"]
    known = {*groups["dev"], *(f"cait-lightning[{group}]" for group in groups)}
    for needed in contrib["optional-dependencies"].values():
        assert {*needed} <= known


def git(*words):
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True)


@pytest.fixture
def release(tmp_path):
    """A wheel of the last release."""
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*").stdout.decode().strip()
    if not tag:
        pytest.skip("no release has a tag in this clone")
    if git("cat-file", "-e", f"{tag}:src/cait/project/Makefile").returncode:
        pytest.skip(f"{tag} has no `cait new`")
    with tarfile.open(fileobj=io.BytesIO(git("archive", tag).stdout)) as files:
        files.extractall(tmp_path / "release", filter="data")
    return build(tmp_path / "release", "wheel", tmp_path / "release")


@pytest.mark.slow
def test_a_project_of_the_last_release_goes_on_with_this_one(release, tree, tmp_path):
    """Its author raises the version, runs the tests, and resumes an older run."""
    project = begin(install(release, tmp_path / "environment"), tmp_path)
    run(project, "make", "train", f"ARGS={SHORT} --trainer.max_steps=8")
    newer = tmp_path / "newer"
    shutil.copytree(tree, newer, ignore=shutil.ignore_patterns("PKG-INFO"))  # it holds the version
    version = newer / "src" / SOURCE.name / "__init__.py"
    version.write_text(re.sub(r'(?<=__version__ = ")[^"]+', r"\g<0>.post1", version.read_text()))
    settings = project / "pyproject.toml"
    text = settings.read_text()
    assert release.as_uri() in text
    settings.write_text(text.replace(release.as_uri(), build(newer, "wheel", newer).as_uri()))
    assert "3 passed" in run(project, "make", "test")
    assert ".post1" in run(project, ".venv/bin/cait", "--version")
    run(project, "make", "resume", "ARGS=--trainer.max_steps=16")
    assert checkpoint(project / "logs/maple")["global_step"] == 16
    assert "top-1" in run(project, "make", "eval")

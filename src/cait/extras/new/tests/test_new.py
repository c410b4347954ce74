"""`cait new`: what it writes; what it refuses is in golden.yaml."""

import os
import subprocess
import sys
import tomllib

import pytest
from harness import LIMIT, REPO, call, works

from cait.extras.new import verb


def output(*command, folder, **variables):
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.fixture
def maple(tmp_path):
    """A project of one's own."""
    done = call(tmp_path, "new", "maple")
    assert "make train" in done.stdout, done.stderr
    return tmp_path / "maple"


def test_it_writes_a_whole_project_under_its_name(maple):
    texts = {}
    for path in maple.rglob("*"):
        if path.is_file():
            texts[str(path.relative_to(maple))] = path.read_text()
    listed = output("git", "ls-files", ".", folder=verb.PROJECT)
    if listed.stdout:  # a clone
        assert texts.keys() == {*listed.stdout.replace(verb.EXAMPLE, "maple").split()}
    whole = "".join([*texts, *texts.values()])
    assert verb.EXAMPLE not in whole
    assert whole.count("\n") <= 250
    settings = tomllib.loads(texts["pyproject.toml"])
    assert settings["project"]["dependencies"] == [verb.engine()]
    assert [*maple.parent.iterdir()] == [maple]  # nothing is left beside it


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path):
    """`ulimit -f` lets a file have 1 KiB, and the Makefile has more."""
    new = f"ulimit -f 1; exec {sys.executable} -m cait new maple"
    done = output("bash", "-c", new, folder=tmp_path)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "dependencies",
    [
        'dependencies = ["cait-lightning ~= 1.2.3"]',
        'dependencies = ["numpy", "cait-lightning ~= 1.2.3", "cait-lightning-contrib[sweep]"]',
        'dependencies = [\n    "cait-lightning ~= 1.2.3",\n    "numpy",\n]',
    ],
)
def test_its_makefile_finds_the_engine(dependencies, tmp_path):
    """Also after the user has named more packages."""
    text = (verb.PROJECT / "pyproject.toml").read_text()
    default = 'dependencies = ["cait-lightning"]'
    (tmp_path / "pyproject.toml").write_text(text.replace(default, dependencies))
    show = '--eval=show: ; @echo "$(ENGINE)"'
    makefile = verb.PROJECT / "Makefile"
    done = output("make", "--no-print-directory", "-f", makefile, show, "show", folder=tmp_path)
    assert done.stdout == "cait-lightning ~= 1.2.3\n"


def test_its_pins_are_those_of_this_repository():
    """Without hashes: a project that is installed from its folder has none."""
    lines = (REPO / "constraints-dev.txt").read_text().splitlines()
    pins = [line.removesuffix(" \\").strip() for line in lines if line[:1].isalnum()]
    assert (REPO / "src/cait/constraints.txt").read_text().splitlines() == pins


def run_tests(project, folder):
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    source = f"{project}/src{os.pathsep}{REPO}/src"
    works(
        output(
            *pytest_there,
            f"--rootdir={folder}",
            project / "tests",
            folder=folder,
            PYTHONPATH=source,
            PYTHONDONTWRITEBYTECODE="1",
        )
    )


@pytest.mark.slow  # CI runs them from a wheel on every push
def test_the_projects_own_tests_pass(tmp_path):
    run_tests(verb.PROJECT, tmp_path)


@pytest.mark.slow
def test_they_pass_with_a_network_and_images_of_ones_own(maple, tmp_path):
    config = maple / "configs/maple.yaml"
    text = config.read_text()
    for old, new in {
        "maple.net:Net": "timm/resnet10t",
        "fields: {width: 32}": "fields: null",
        "data/digits": "data/leaves",
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    config.write_text(text)
    run_tests(maple, tmp_path)

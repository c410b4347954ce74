"""`cait new`: what it writes, and what it refuses."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from harness import LIMIT, REPO

from cait.cli import main
from cait.extras.new import verb

Capture = pytest.CaptureFixture[str]


def test_it_writes_a_whole_project_under_its_name(tmp_path: Path, capsys: Capture) -> None:
    main(["new", "maple", f"--into={tmp_path}"])
    assert "make train" in capsys.readouterr().out
    project = tmp_path / "maple"
    written = {path.relative_to(project) for path in project.rglob("*") if path.is_file()}
    listed = subprocess.run(
        ["git", "ls-files", "."], cwd=verb.PROJECT, capture_output=True, text=True, timeout=LIMIT
    )
    if listed.returncode == 0 and listed.stdout:  # a clone
        expected = listed.stdout.replace(verb.EXAMPLE, "maple").split()
        assert written == {*map(Path, expected)}
    lines = 0
    for path in written:
        assert verb.EXAMPLE not in str(path)
        text = (project / path).read_text()
        assert verb.EXAMPLE not in text
        lines += text.count("\n")
    assert lines <= 250
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["dependencies"] == [verb.engine()]
    assert [*tmp_path.iterdir()] == [project]  # nothing is left beside it


@pytest.mark.parametrize(
    "name", ["Maple", "1a", "a-b", "a b", "", "class", "torch", "json", "data", "tests"]
)
def test_a_name_that_is_no_package_is_refused(name: str, tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["new", name, f"--into={tmp_path}"])
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["a folder", "a file", "a link to nothing"])
def test_what_is_there_is_left_alone(kind: str, tmp_path: Path, capsys: Capture) -> None:
    maple = tmp_path / "maple"
    if kind == "a folder":
        maple.mkdir()
    elif kind == "a file":
        maple.touch()
    else:
        maple.symlink_to("nothing")
    with pytest.raises(SystemExit, match="2"):
        main(["new", "maple", f"--into={tmp_path}"])
    assert f"{maple} exists" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [maple]


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path) -> None:
    """`ulimit -f` lets a file have 1 KiB, and the Makefile has more."""
    new = f"ulimit -f 1; exec {sys.executable} -m cait new maple --into {tmp_path}"
    done = subprocess.run(["bash", "-c", new], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


def test_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["new", "maple", f"--into={tmp_path / 'nowhere'}"])


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (None, "cait-lightning ~= 1.2.3"),
        (
            {"url": "file:///a/clone", "dir_info": {"editable": True}},
            "cait-lightning @ file:///a/clone",
        ),
        ({"url": "file:///a.whl", "archive_info": {}}, "cait-lightning @ file:///a.whl"),
        (
            {"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "cait-lightning @ git+https://x/y.git@abc",
        ),
    ],
)
def test_the_project_depends_on_where_this_package_is_from(
    source: dict | None, requirement: str, tmp_path: Path
) -> None:
    (tmp_path / "METADATA").write_text("Name: cait-lightning\nVersion: 1.2.3\n")
    if source:
        (tmp_path / "direct_url.json").write_text(json.dumps(source))
    assert verb.requirement_of(PathDistribution(tmp_path)) == requirement


@pytest.mark.parametrize(
    "dependencies",
    [
        'dependencies = ["cait-lightning ~= 1.2.3"]',
        'dependencies = ["numpy", "cait-lightning ~= 1.2.3", "cait-lightning-contrib[sweep]"]',
        'dependencies = [\n    "cait-lightning ~= 1.2.3",\n    "numpy",\n]',
    ],
)
def test_its_makefile_finds_the_engine(dependencies: str, tmp_path: Path) -> None:
    """Also after the user has named more packages."""
    text = (verb.PROJECT / "pyproject.toml").read_text()
    default = 'dependencies = ["cait-lightning"]'
    assert default in text
    (tmp_path / "pyproject.toml").write_text(text.replace(default, dependencies))
    show = [
        "make",
        "--no-print-directory",
        "-f",
        verb.PROJECT / "Makefile",
        '--eval=show: ; @echo "$(ENGINE)"',
        "show",
    ]
    done = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "cait-lightning ~= 1.2.3\n"


def test_its_pins_are_those_of_this_repository() -> None:
    """Without hashes: a project that is installed from its folder has none."""
    pins = [
        line.removesuffix(" \\").strip()
        for line in (REPO / "constraints-dev.txt").read_text().splitlines()
        if line[:1].isalnum()
    ]
    assert (REPO / "src/cait/constraints.txt").read_text().splitlines() == pins


def run_tests(project: Path, folder: Path) -> None:
    source = os.pathsep.join([str(project / "src"), str(REPO / "src")])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={folder}",
            project / "tests",
        ],
        env=os.environ | {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # CI runs them from a wheel on every push
def test_the_projects_own_tests_pass(tmp_path: Path) -> None:
    run_tests(verb.PROJECT, tmp_path)


@pytest.mark.slow
def test_they_pass_with_a_network_and_images_of_ones_own(tmp_path: Path) -> None:
    main(["new", "maple", f"--into={tmp_path}"])
    project = tmp_path / "maple"
    config = project / "configs/maple.yaml"
    text = config.read_text()
    for old, new in (
        ("maple.net:Net", "timm/resnet10t"),
        ("fields: {width: 32}", "fields: null"),
        ("data/digits", "data/leaves"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    config.write_text(text)
    run_tests(project, tmp_path)

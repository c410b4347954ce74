"""`make own` and `make rename` on copies of the repository: what is left works, and says nothing of what has gone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import pytest
from harness import LIMIT

pytestmark = pytest.mark.slow

KEPT = ("pretrained", "recipe", "visualize")
PROJECTS = [("spriteclf", KEPT, "yes"), ("leaf_net", ("publish", "visualize"), "no")]
"""Its name, the extras that stay, and whether CaiT does."""
MEANT = re.compile(
    r"CaiT\b|CaiTConfig|\bmodels?[./]cait\b|\bcait(\.py|_[a-z0-9{*]+)|[a-z]_cait(_|\b)|_CAIT|\bCait(\.group_matcher|$)"
)
"""Mentions of the network, of timm's ones and of their files."""
NETWORK = '''"""A file of one's own."""

from pathlib import Path

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.words = Path(__file__).read_text()
        self.head = nn.Linear(3 * img_size**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, K]."""
        return self.head(images.flatten(1))
'''


def run(folder: Path, *command: str, status: int = 0) -> str:
    """What a command prints in a copy, with the copy's package to import."""
    env = os.environ | {
        "PYTHONPATH": str(folder / "src"),
        "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * LIMIT,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def copied(folder: Path) -> Path:
    """A clone with the virtual environment of this one, which nothing in it may change."""
    if not check.working_tree():
        pytest.skip("the files of the repository are listed by git, and this is no checkout")
    check.copy_to(folder)
    for words in (
        "init --quiet",
        "add --all",
        "-c user.name=me -c user.email=me@here commit --quiet --message=all",
    ):
        run(folder, "git", *words.split())
    return folder


def set_up(folder: Path, name: str) -> None:
    """What `make` would install: nothing but the package's command."""
    command, installed = folder / ".venv/bin", (folder / ".venv/bin").resolve()
    command.unlink()
    command.mkdir()
    for tool in installed.iterdir():
        (command / tool.name).symlink_to(tool)
    (command / name).write_text(f'#!/bin/sh\nexec {command / "python"} -m {name} "$@"\n')
    (command / name).chmod(0o755)
    for mark in (".ready", ".tools"):
        (folder / ".venv" / mark).touch()


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda project: project[0])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, kept, cait = request.param
    folder = copied(tmp_path_factory.mktemp("own") / name)
    said = run(
        folder, sys.executable, "scripts/own.py", name, "--keep", " ".join(kept), "--cait", cait
    )
    assert said.endswith(f"Extras: {', '.join(kept)}.\n")
    (folder / f"src/{name}/model/my_net.py").write_text(NETWORK)
    run(folder, "git", "add", "--all")
    set_up(folder, name)
    return folder


def test_only_the_network_keeps_its_name_and_nothing_names_what_has_gone(own: Path) -> None:
    found = run(own, "git", "grep", "-hi", "cait", "--", ".", ":!constraints*").splitlines()
    assert [line for line in found if re.search("cait", MEANT.sub("", line), re.I)] == []
    gone = r"benchmarks/|tests/house|extras[./](screen|paper)|configs/imagenet|docs/(recipe|cait|stems)\.md|docs.check"
    assert run(own, "git", "grep", "-nE", gone, "--", ".", ":!tests", status=1) == ""
    targets = "make (bench|house|laws|own NAME|rename|test-kernel|torture)"
    assert run(own, "git", "grep", "-nE", targets, status=1) == ""
    assert len((own / "README.md").read_text().splitlines()) < 40
    imports = run(own, "git", "grep", "-hE", r"\bextras(\.| import )", "--", "src", ":!*/tests/*")
    # what extras share goes with the last that imports it
    for path in own.glob("src/*/extras/[a-z]*.py"):
        assert re.search(rf"\bextras(\.| import (\w+, )*){path.stem}\b", imports), path


def test_little_is_left_to_own(own: Path) -> None:
    files = [
        path
        for place in ("src", "docs")
        for path in (own / place).rglob("*.py")
        if path.parent.name != "tests"
    ]
    assert sum(len(path.read_text().splitlines()) for path in files) < 12_040


def test_its_style_and_its_pages_are_in_order(own: Path) -> None:
    assert "Success" in run(own, "make", "lint")
    run(own, "make", "docs")
    assert (own / ".site/html/docs/settings.html").exists()


def test_it_trains_and_scores_a_network_of_its_own(own: Path) -> None:
    run(
        own,
        "make",
        "train",
        f"ARGS=--trainer.max_steps 4 --model.name {own.name}.model.my_net:Net --model.fields null",
    )
    assert "top-1" in run(own, "make", "eval", "RUN=digits")
    run(
        own,
        "make",
        "train",
        "RUN=resnet",
        "ARGS=--trainer.max_steps 2 --model.name timm/resnet18 --model.fields null",
    )
    run(own, "make", "visualize", "RUN=resnet")
    if own.name == "leaf_net":
        run(own, "make", "export", "RUN=resnet")


def test_its_tests_pass(own: Path) -> None:
    run(own, "make", "test")


def test_what_cannot_be_done_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for words, said in (
        (["torch"], "others bring"),
        (["class"], "no name"),
        (["2nd"], "no name"),
        (["cait"], "src/cait is there already"),
        (["model"], "has a variable model, which would hide the package"),
        (
            ["mine", "--keep", "recipe nothing"],
            "own: there is no extra nothing; there are annotations, ",
        ),
    ):
        assert said in run(folder, sys.executable, "scripts/own.py", *words, status=1)
    assert run(folder, "git", "status", "--porcelain") == ""
    (folder / "new.txt").touch()
    assert "commit or stash your changes" in run(
        folder, sys.executable, "scripts/own.py", "mine", status=1
    )
    shutil.rmtree(folder / ".git")
    assert "`git init`, add and commit" in run(
        folder, sys.executable, "scripts/own.py", "mine", status=1
    )


def test_one_that_stops_halfway_says_how_to_get_back(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "docs/site.toml").write_bytes(b"\xff")
    run(
        folder,
        "git",
        "-c",
        "user.name=me",
        "-c",
        "user.email=me@here",
        "commit",
        "--all",
        "--quiet",
        "--message=odd",
    )
    said = run(folder, sys.executable, "scripts/own.py", "mine", status=1)
    assert not (folder / "contrib").exists()
    run(
        folder,
        "bash",
        "-c",
        re.findall(r"own: it stopped halfway; `(.*)` brings all back\n$", said)[0],
    )
    assert (folder / "contrib").exists()
    assert run(folder, "git", "status", "--porcelain") == ""


def test_a_package_that_is_only_renamed_keeps_all_else(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    assert "cait is own_package now" in run(
        folder, "make", "rename", "NAME=own_package", f"PYTHON={sys.executable}"
    )
    run(folder, "git", "add", "--all")
    set_up(folder, "own_package")
    found = run(
        folder, "git", "grep", "-i", "cait", "--", "src", "contrib", "docs", "configs", "Makefile"
    ).splitlines()
    assert [
        line
        for line in found
        if re.search(r"\bcait\b", MEANT.sub("", line)) and "docs/cait" not in line
    ] == []
    assert "usage: own_package VERB" in run(folder, sys.executable, "-m", "own_package", "--help")
    run(folder, "make", "lint", "docs")
    run(folder, sys.executable, "-m", "pytest", "tests/house", "tests/test_docs.py", "tests/cli")

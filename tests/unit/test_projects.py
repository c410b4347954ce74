"""What a package in src/ of the working folder defines, beside pyproject.toml, needs no trust."""

from pathlib import Path

import pytest
from harness import REPO

from cait import signature

PARTS = """
from os import system

import grove.module as near

kill = system
score = dict(beta=2)


class Announce:
    class Inner: ...

    def method(self): ...


def loss(): ...
"""
DEFINED = ["grove.module:Module", "grove.parts.Announce", "grove.parts:loss", "grove.parts:score"]
IMPORTED = ["system", "near", "kill", "os.system"]
NO_DEFINITION = ["Inner", "method", "Announc", "cait"]
ELSEWHERE = [
    "grove.absent:x",
    "logs.grove:x",
    "logs.run.evil:x",
    "os:system",
    "grove; x",
    "data.data_dir grove",
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    package = tmp_path / "src/grove"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "module.py").write_text("class Module: ...\n")
    (package / "parts.py").write_text(PARTS)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", DEFINED)
def test_what_the_project_defines_is_its_own(name, project):
    assert signature.is_of_project(name)
    signature.check_code(Path("it"), {"metrics": [name]}, None)
    (project / "pyproject.toml").unlink()
    assert not signature.is_of_project(name)


def test_what_it_imports_or_lies_elsewhere_is_not(project):
    names = list(ELSEWHERE)
    for name in IMPORTED + NO_DEFINITION:
        names += [f"grove.parts:{name}", f"grove.parts.{name}"]
    for name in names:
        assert not signature.is_of_project(name), name


@pytest.mark.parametrize("name", ["cait.disk:remove", "cait.disk:os.abort", "cait.disk.remove"])
def test_a_clone_of_this_package_is_no_project(name, monkeypatch):
    """A stranger could name its every function else."""
    monkeypatch.chdir(REPO)
    assert not signature.is_of_project(name)

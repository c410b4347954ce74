"""Extras are folders that one deletes: the core works with any of them and with none, and names none."""

import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LIMIT, REPO, environment, link_digits, rows, start
from runs import wait_for_steps

from cait import plugins

SOURCE = REPO / "src" / "cait"
EXTRAS = sorted(path.parent.name for path in (SOURCE / "extras").glob("*/__init__.py"))
CONTRIB = sorted(path.parent.name for path in REPO.glob("contrib/*/__init__.py"))
CORE = [
    path
    for path in SOURCE.rglob("*.py")
    if not path.is_relative_to(SOURCE / "extras") and "tests" not in path.relative_to(SOURCE).parts
]
SMALL = [
    "--config=configs/digits.yaml",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--model.fields.embed_dim=32",
    "--model.fields.depth=2",
    "--data.batch_size=64",
    "--data.num_workers=0",
    "--save_every_n_steps=1",
    "--trainer.log_every_n_steps=1",
]
OTHERS = {
    "background": "color",
    "fused": "AdamW",
    "runs": "a plural",
    "logger": "the Trainer's setting",
}
OTHERS["pretrained"] = "timm's word for published weights"
OTHERS["extra"] = "a key of evaluation.json, which no metric of the user's own may have"
OTHERS["check"] = "a method that a strategy may have"
OTHERS["monitor"] = "Lightning's setting of a callback"
"""Words of the core that an extra has for a name or a setting, and what they mean there."""


@functools.cache
def imported(path: Path) -> list[str]:
    """The modules that a file imports, also within functions, and those that it names in a string."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("cait.")
        ):
            found.append(node.value.replace(":", "."))
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_nothing_else_imports_it(name: str) -> None:
    folder = SOURCE / "extras" / name
    others = [
        path
        for path in SOURCE.rglob("*.py")
        if not path.is_relative_to(folder) and "tests" not in path.parts
    ]
    for path in others:
        found = [
            module for module in imported(path) if f"{module}.".startswith(f"cait.extras.{name}.")
        ]
        assert not found, f"{path} needs the extra {name}: {found}"


@pytest.fixture
def no_contrib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing called contrib has been imported, or can be."""
    for name in [name for name in sys.modules if f"{name}.".startswith("contrib.")]:
        monkeypatch.delitem(sys.modules, name)
    roots = {"", str(REPO), os.getcwd()}
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in roots])


def contrib(root: Path, name: str) -> Path:
    """A folder `contrib` with a part of this name."""
    (root / "contrib" / name).mkdir(parents=True)
    (root / "contrib/__init__.py").touch()
    (root / "contrib" / name / "__init__.py").touch()
    return root


@pytest.mark.usefixtures("no_contrib")
def test_contrib_is_found_in_a_clone_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contrib(tmp_path, "mine")
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "src/cait/extras")
    for is_installed, parts in ((True, []), (False, [("mine", "contrib.mine")])):
        monkeypatch.setattr(plugins, "IS_INSTALLED", is_installed)
        assert plugins._contributed() == parts
    assert str(tmp_path) in sys.path
    shutil.rmtree(tmp_path / "contrib")
    assert plugins._contributed() == []


@pytest.mark.usefixtures("no_contrib")
def test_contrib_is_found_where_it_is_installed_unless_a_clone_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contrib(tmp_path / "packages/cait_contrib", "installed")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "src/cait/extras")
    assert plugins._contributed() == [("installed", "contrib.installed")]
    assert str(tmp_path / "packages/cait_contrib") in sys.path
    sys.path.pop()
    contrib(tmp_path, "mine")
    assert plugins._contributed() == [("mine", "contrib.mine")]


@pytest.mark.usefixtures("no_contrib")
@pytest.mark.parametrize("kind", ["package", "module", "namespace"])
def test_a_contrib_of_ones_own_costs_that_of_cait_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.tell_once.cache_clear()
    contrib(tmp_path / "clone", "mine")
    desk = tmp_path / "desk"
    if kind == "package":
        contrib(desk, "theirs")
    elif kind == "module":
        desk.mkdir()
        (desk / "contrib.py").touch()
    else:
        (desk / "contrib").mkdir(parents=True)
    monkeypatch.syspath_prepend(desk)
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "clone/src/cait/extras")
    if kind == "namespace":  # which Python takes last
        assert plugins._contributed() == [("mine", "contrib.mine")]
        assert not capsys.readouterr().err
    else:
        assert plugins._contributed() == []
        told = f"left out {tmp_path}/clone/contrib: Python finds another contrib first"
        assert capsys.readouterr().err.startswith(told)


@functools.cache
def strings(path: Path) -> set[str]:
    """The strings of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("name", EXTRAS + CONTRIB)
def test_the_core_does_not_name_it(name: str) -> None:
    extra = plugins.extras()[name]
    names = {
        name,
        *getattr(extra, "VERBS", {}),
        *(setting.name for setting in getattr(extra, "SETTINGS", [])),
    }
    place = re.compile(rf"(extras|contrib)[./]{name}\b")
    for path in CORE:
        assert not (names & strings(path)) - OTHERS.keys(), f"{path} names the extra {name}"
        assert not place.search(path.read_text()), f"{path} names the extra {name}"
    assert not re.search(
        rf"^{name}:|(extras|contrib)/{name}\b|cait {name}\b", (REPO / "Makefile").read_text(), re.M
    )


@pytest.fixture
def copy(tmp_path: Path, digits_root: Path) -> Path:
    """A copy of the tree, with the digits in it."""
    leave_out = shutil.ignore_patterns("__pycache__", "tests", ".*")
    shutil.copytree(REPO / "src", tmp_path / "src", ignore=leave_out)
    shutil.copytree(REPO / "configs", tmp_path / "configs")
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(REPO / file, tmp_path)
    link_digits(tmp_path, digits_root)
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the `cait` of a copy."""
    env = environment() | {"PYTHONPATH": str(folder / "src")}
    return start(folder, *arguments, env=env)


def run(folder: Path, *arguments: str) -> str:
    """What `cait` prints in a copy; it must succeed."""
    job = started(folder, *arguments)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    return output


def killed(folder: Path, name: str) -> None:
    """Train a run in a copy and kill it once it has saved a checkpoint."""
    job = started(folder, "fit", *SMALL, f"--run_name={name}", "--trainer.max_epochs=100")
    wait_for_steps(folder / "logs" / name, 2, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    assert (folder / "logs" / name / "checkpoints/last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "deleted", [EXTRAS, *([name] for name in EXTRAS)], ids=lambda names: "+".join(names)[:40]
)
def test_the_core_works_without(deleted: list[str], copy: Path) -> None:
    verbs = {verb for name in deleted for verb in getattr(plugins.extras()[name], "VERBS", {})}
    killed(copy, "before")  # a run that has something of each extra in its configuration
    for name in deleted:
        shutil.rmtree(copy / "src/cait/extras" / name)
    make = ["make", "help", f"PYTHON={sys.executable}"]
    targets = subprocess.run(
        make, cwd=copy, capture_output=True, text=True, timeout=LIMIT, check=True
    ).stdout
    for text in (run(copy, "--help"), targets):
        assert not verbs & set(re.findall(r"^  ([a-z-]+) ", text, re.M))
        assert "predict" in text
    steps = len(rows(copy / "logs/before"))
    told = run(copy, "resume", "before", "--trainer.max_epochs=1")
    assert not re.search("Be aware|not resumable|resuming from a checkpoint that ended", told)
    assert (copy / "logs/before/checkpoints/best.ckpt").exists()
    assert len(rows(copy / "logs/before")) > steps
    killed(copy, "new")
    run(copy, "resume", "new", "--trainer.max_epochs=1")
    assert "top-1" in run(copy, "eval", "new")
    image = next((copy / "data/digits/val").rglob("*.png"))
    assert image.name in run(copy, "predict", "new", str(image))


@pytest.mark.slow
def test_any_network_does_without_cait(copy: Path) -> None:
    """What docs/your_project.md says of deleting it."""
    for name in ("cait", "attention", "residual"):
        (copy / f"src/cait/model/{name}.py").unlink()
    for name in ("paper", "recompute"):
        shutil.rmtree(copy / "src/cait/extras" / name)
    fit = [
        "fit",
        "--config=configs/digits.yaml",
        *(word for word in SMALL[1:] if "fields" not in word),
    ]
    other = [
        "--model.name=timm/resnet18",
        "--model.fields=null",
        "--run_name=other",
        "--trainer.max_steps=2",
        "--data.img_size=64",
    ]
    assert "timm/resnet18" in run(copy, *fit, *other)
    assert "top-1" in run(copy, "eval", "other")
    run(copy, "export", "other", "--format=torch_export")
    run(copy, "export", "other")
    assert (copy / "logs/other/export/model.pt2").exists()
    images = str(next((copy / "data/digits/val").iterdir()))
    assert "logs/other/visualize/" in run(copy, "visualize", "other", f"--images={images}")
    refused = started(copy, *fit, "--run_name=cait")
    told = refused.communicate(timeout=LIMIT)[0].splitlines()
    assert refused.returncode == 2
    assert told[-1].startswith("cait: error: cannot import cait.model.cait:build: No module named")

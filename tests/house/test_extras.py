"""Extras are folders that one deletes: the core works with any of them and with none, and names none."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LIMIT, REPO, environment, link_digits, over_table, parsed, rows, start
from harness import SMALL as QUICK
from runs import wait_for_steps
from source_files import CORE, FILES, SOURCE, strings

from cait import plugins

EXTRAS = sorted(path.parent.name for path in (SOURCE / "extras").glob("*/__init__.py"))
CONTRIB = sorted(path.parent.name for path in REPO.glob("contrib/*/__init__.py"))
WORDS = parsed(Path(__file__).with_name("words_of_extras.yaml"))
SMALL = [*QUICK, "--data.num_workers=0", "--save_every_n_steps=1", "--trainer.log_every_n_steps=1"]


@pytest.mark.parametrize("name", EXTRAS + CONTRIB)
def test_nothing_else_names_it(name):
    """Neither an import, also within functions, nor a string; the core has no word of its settings and verbs."""
    extra = plugins.extras()[name]
    settings = [setting.name for setting in getattr(extra, "SETTINGS", [])]
    words = {name, *getattr(extra, "VERBS", {}), *settings} - WORDS.keys()
    mention = re.compile(rf"(extras|contrib)([./]|\s+import\s+(\([^)]*|.*)\b){name}\b")
    for path in FILES:
        if not path.is_relative_to(SOURCE / "extras" / name):
            assert not mention.search(path.read_text()), f"{path} needs {name}"
    for path in CORE:
        assert words.isdisjoint(strings(path)), f"{path} names {name}"
    target = re.compile(rf"^{name}:|(extras|contrib)/{name}\b|cait {name}\b", re.M)
    assert not target.search((REPO / "Makefile").read_text())


@over_table(__file__, "contrib")
def test_contrib_is_that_of_the_clone_or_the_installed_one(
    files, found, warns, tmp_path, monkeypatch, capsys
):
    for name in [name for name in sys.modules if f"{name}.".startswith("contrib.")]:
        monkeypatch.delitem(sys.modules, name)
    for file in map(tmp_path.joinpath, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    others = [path for path in sys.path if path not in ("", str(REPO), os.getcwd())]
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/desk", f"{tmp_path}/packages", *others])
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "clone/src/cait/extras")
    importlib.invalidate_caches()
    assert plugins._contributed() == [(name, f"contrib.{name}") for name in found]
    told = capsys.readouterr().err
    assert told.startswith(f"left out {tmp_path}/clone/contrib") == warns
    assert bool(plugins.tell_once.cache_info().currsize) == warns


def test_contrib_of_a_clone_is_not_that_of_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "contrib/mine").mkdir(parents=True)
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "src/cait/extras")
    monkeypatch.setattr(plugins, "IS_INSTALLED", True)
    monkeypatch.setattr(plugins, "_folder_of", {}.get)
    assert plugins._contributed() == []


@pytest.fixture
def copy(tmp_path, digits_root):
    """A copy of the tree, with the digits in it."""
    leave_out = shutil.ignore_patterns("__pycache__", "tests", ".*")
    shutil.copytree(REPO / "src", tmp_path / "src", ignore=leave_out)
    shutil.copytree(REPO / "configs", tmp_path / "configs")
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(REPO / file, tmp_path)
    link_digits(tmp_path, digits_root)
    return tmp_path


def started(folder, *arguments):
    """Start the `cait` of a copy."""
    env = environment() | {"PYTHONPATH": str(folder / "src")}
    return start(folder, *arguments, env=env)


def run(folder, *arguments):
    """What `cait` prints in a copy; it must succeed."""
    job = started(folder, *arguments)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    return output


def killed(folder, name):
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
def test_the_core_works_without(deleted, copy):
    verbs = {verb for name in deleted for verb in getattr(plugins.extras()[name], "VERBS", {})}
    killed(copy, "before")  # a run that has something of each extra in its configuration
    for name in deleted:
        shutil.rmtree(copy / "src/cait/extras" / name)
    make = ["make", "help", f"PYTHON={sys.executable}"]
    targets = subprocess.check_output(make, cwd=copy, text=True, timeout=LIMIT)
    for text in (run(copy, "--help"), targets):
        assert not verbs & set(re.findall(r"^  ([a-z-]+) ", text, re.M))
        assert "predict" in text
    steps = len(rows(copy / "logs/before"))
    output = run(copy, "resume", "before", "--trainer.max_epochs=1")
    assert not re.search("Be aware|not resumable|resuming from a checkpoint that ended", output)
    assert (copy / "logs/before/checkpoints/best.ckpt").exists()
    assert len(rows(copy / "logs/before")) > steps
    killed(copy, "new")
    run(copy, "resume", "new", "--trainer.max_epochs=1")
    assert "top-1" in run(copy, "eval", "new")
    image = next((copy / "data/digits/val").rglob("*.png"))
    assert image.name in run(copy, "predict", "new", str(image))


@pytest.mark.slow
def test_any_network_does_without_cait(copy):
    """What docs/your_project.md says of deleting it."""
    for name in ("cait", "attention", "residual"):
        (copy / f"src/cait/model/{name}.py").unlink()
    for name in ("paper", "recompute"):
        shutil.rmtree(copy / "src/cait/extras" / name)
    fit = ["fit", *(word for word in SMALL if "fields" not in word)]
    other = (
        "--model.name=timm/resnet18 --model.fields=null --data.img_size=64 --trainer.max_steps=2"
    )
    assert "timm/resnet18" in run(copy, *fit, "--run_name=other", *other.split())
    assert "top-1" in run(copy, "eval", "other")
    run(copy, "export", "other", "--format=torch_export")
    run(copy, "export", "other")
    assert (copy / "logs/other/export/model.pt2").exists()
    images = str(next((copy / "data/digits/val").iterdir()))
    assert "logs/other/visualize/" in run(copy, "visualize", "other", f"--images={images}")
    job = started(copy, *fit, "--run_name=cait")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 2
    assert "cannot import cait.model.cait:build" in output

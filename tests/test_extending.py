"""The package of docs/extending.md: installed, its verb, setting and callback are there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pages
import pytest
from harness import LIMIT, SMALL, environment

pytestmark = pytest.mark.slow

PROJECT = "images_seen_project"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `pip install --no-deps --target` would put there, built from the page."""
    folder, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("installed")
    blocks = [
        block
        for block in pages.blocks(pages.pages())
        if block.words.get("file", "").startswith(PROJECT)
    ]
    assert len(blocks) == 4
    for block in blocks:
        (folder / block.words["file"]).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.words["file"]).write_text(block.text)
    code = f"import hatchling.build; hatchling.build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / PROJECT, check=True, timeout=LIMIT)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def cait(place: Path, installed: Path | None, *arguments: str, status: int = 0) -> str:
    """What `cait` prints, in a process that finds the package if it is given."""
    env = environment()
    if installed is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(installed))))
    done = subprocess.run(
        [sys.executable, "-m", "cait", *arguments],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_a_run_counts_as_the_page_says(place: Path, installed: Path) -> None:
    (commands,) = [
        block.text
        for block in pages.blocks(pages.pages())
        if block.language == "sh" and "extending" in block.place
    ]
    assert all(
        words in commands
        for words in (f"./{PROJECT}", "--count_every_n_steps 20", "cait seen counted")
    )
    assert "images that a run has seen" in cait(place, installed, "--help")
    fit = ("fit", *SMALL, "--run_name=counted", "--trainer.max_steps=2")
    assert "128 images seen" in cait(place, installed, *fit, "--count_every_n_steps=2").splitlines()
    assert "128 images seen" in cait(place, installed, "seen", "counted").splitlines()
    assert (
        "256 images seen"
        in cait(place, installed, "resume", "counted", "--trainer.max_steps=4").splitlines()
    )
    # Without the package there is no such verb, and the run still goes on.
    assert "unknown verb 'seen'" in cait(place, None, "seen", "counted", status=2)
    resumed = cait(place, None, "resume", "counted", "--trainer.max_steps=5")
    assert "left out count_every_n_steps" in resumed
    assert "images seen" not in resumed
    cait(place, installed, "fit", *SMALL, "--run_name=plain", "--trainer.max_steps=1")
    message = "cait: error: logs/plain did not count: train with --count_every_n_steps\n"
    assert cait(place, installed, "seen", "plain", status=2).endswith(message)

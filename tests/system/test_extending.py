"""The package of docs/extending.md: installed, its verb, setting and callback are there."""

import os
import zipfile

import pages
import pytest
from harness import LIMIT, SMALL, environment, python, start

pytestmark = pytest.mark.slow

PROJECT = "images_seen_project"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install --no-deps --target` would put there, built from the page."""
    folder = tmp_path_factory.mktemp("project")
    for block in pages.blocks(pages.pages()):
        name = block.words.get("file", "")
        if name.startswith(PROJECT):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    built = python(code, folder / PROJECT)
    with zipfile.ZipFile(folder / built.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def cait(place, installed, *arguments, status=0):
    """The lines that `cait` prints, in a process that finds the package if it is given."""
    variables = environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{installed}"
    job = start(place, *arguments, env=variables)
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == status, printed
    return printed.splitlines()


def test_the_page_says_how_to_count():
    [commands] = [
        block.text
        for block in pages.blocks(pages.pages())
        if "extending" in block.place and block.language == "sh"
    ]
    for words in (f"./{PROJECT}", "--count_every_n_steps 20", "cait seen counted"):
        assert words in commands


def test_a_run_counts_as_the_page_says(place, installed):
    assert "images that a run has seen" in "\n".join(cait(place, installed, "--help"))
    fit = ("fit", *SMALL, "--run_name=counted", "--trainer.max_steps=2")
    assert "128 images seen" in cait(place, installed, *fit, "--count_every_n_steps=2")
    assert "128 images seen" in cait(place, installed, "seen", "counted")
    resume = ("resume", "counted")
    assert "256 images seen" in cait(place, installed, *resume, "--trainer.max_steps=4")
    # Without the package there is no such verb, and the run still goes on.
    assert "unknown verb 'seen'" in cait(place, "nowhere", "seen", "counted", status=2)[-1]
    printed = "\n".join(cait(place, "nowhere", *resume, "--trainer.max_steps=5"))
    assert "left out count_every_n_steps" in printed
    assert "images seen" not in printed


def test_a_run_that_did_not_count_is_told(place, installed):
    cait(place, installed, "fit", *SMALL, "--run_name=plain", "--trainer.max_steps=1")
    message = "cait: error: logs/plain did not count: train with --count_every_n_steps"
    assert cait(place, installed, "seen", "plain", status=2)[-1] == message

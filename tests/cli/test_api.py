"""`cait.fit` where people call it: in a notebook, in a thread, and in a script on two processes."""

import os
import re
import sys
import textwrap

import pytest
from harness import LIMIT, REPO, beside, checkpoint, environment, link_digits, script, works
from runs import assert_same
from same import same

import cait

SETTINGS = beside(__file__)
CONFIG = [str(REPO / "configs/digits.yaml")]
BEGIN = f"""
import cait
SETTINGS = {SETTINGS}
CONFIG = {CONFIG}
IMAGE = "data/digits/val/7/0081.png"
"""
SCRIPT = f"""{BEGIN}
import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--resumes", action="store_true")
asked = parser.parse_args()
settings = SETTINGS | {{"trainer.devices": 2}}
if asked.resumes:
    run = cait.fit(resume=asked.name, settings={{"trainer.max_epochs": 2}})
else:
    run = cait.fit(config=CONFIG, settings=settings, run_name=asked.name)
print("of", os.environ["LOCAL_RANK"], run.predict(IMAGE, top_k=1))
"""


@pytest.fixture
def desk(tmp_path, digits_root, monkeypatch):
    link_digits(tmp_path, digits_root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    return tmp_path


def outputs(desk, *cells):
    """What the cells of a notebook print and give, with the error that one ends in."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.v4.new_notebook()
    content.cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
    resources = {"metadata": {"path": str(desk)}}
    client = NotebookClient(content, timeout=LIMIT, allow_errors=True, resources=resources)
    client.execute(env=environment())
    return [str(cell["outputs"]) for cell in content.cells]


@pytest.mark.slow
def test_in_a_notebook(desk):
    _, trained, answer, in_a_thread, resumed, two = outputs(
        desk,
        BEGIN,
        'run = cait.fit("data/digits", SETTINGS, config=CONFIG, run_name="cell")',
        "run.predict(IMAGE, top_k=1)",
        """
        import threading

        answers = []
        def train():
            answers.append(cait.fit(settings=SETTINGS, config=CONFIG, run_name="thread"))
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        answers[0].predict(IMAGE, top_k=1)
        """,
        'cait.fit(resume="cell", settings={"trainer.max_epochs": 2}).class_names[:2]',
        'cait.fit(settings=SETTINGS | {"trainer.devices": 2}, config=CONFIG, run_name="two")',
    )
    cait.fit(config=CONFIG, settings=SETTINGS, run_name="here")
    here = checkpoint(desk / "logs/here")["state_dict"]
    assert same(checkpoint(desk / "logs/thread")["state_dict"], here)
    cait.fit(resume="here", settings={"trainer.max_epochs": 2})
    assert_same(desk / "logs/cell", desk / "logs/here")
    assert "epoch 1/1" in trained
    [probability] = re.findall(r"'probability': [\d.]+", answer)
    assert probability in in_a_thread
    assert "epoch 2/2" in resumed
    assert "['0', '1']" in resumed
    assert "a notebook takes --trainer.devices 1" in two
    assert not (desk / "logs/two").exists()


@pytest.mark.slow
def test_in_a_script_on_two_processes(desk):
    """Lightning starts the script again, with its own words, guarded by `if __name__ == ...` or not."""
    (desk / "mine.py").write_text(SCRIPT)
    for words in (["cut"], ["cut", "--resumes"]):
        done = works(script("mine.py", desk, *words))
        answers = {line[5:] for line in done.stdout.splitlines() if line.startswith("of ")}
        assert len(answers) == 1
        assert done.stdout.count("of 0 [") == done.stdout.count("of 1 [") == 1
    two = ["--trainer.devices=2", "--trainer.max_epochs=2", "--run_name=whole"]
    words = [f"--{name}={value}" for name, value in SETTINGS.items()]
    works(script("-m", desk, "cait", "fit", f"--config={CONFIG[0]}", *words, *two))
    assert_same(desk / "logs/cut", desk / "logs/whole")
    assert os.environ.get("LOCAL_RANK") is None

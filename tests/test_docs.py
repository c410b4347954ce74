"""The documentation: its links lead somewhere, its commands can be found, and `make docs-check` tells a wrong one."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from harness import REPO

spec = importlib.util.spec_from_file_location("check", REPO / "docs" / "check.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
PAGES = sorted({*REPO.glob("*.md"), *check.pages()})
EXTRAS, CONTRIB = REPO / "src/cait/extras", REPO / "contrib"
OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?!/)[\w.-]+/|\\\\Users")
"""A path from the root, as no output may have it."""


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings."""
    return {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)", text, re.M)
    }


def is_of_a_removed_extra(target: Path) -> bool:
    """Whether a link leads into a folder of cait/extras or contrib that is not there: any of them may be removed."""
    path = Path(os.path.normpath(target))
    places = [place for place in (EXTRAS, CONTRIB) if path.is_relative_to(place)]
    return any(not (place / path.relative_to(place).parts[0]).exists() for place in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if is_of_a_removed_extra(target):
                continue
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


def test_pages_have_commands_and_every_skipped_one_a_reason() -> None:
    found = list(check.blocks(check.pages()))
    assert sum(len(block.commands) for block in found if block.language == "bash") > 50
    for block in found:
        assert block.words.keys() <= {"skip", "file"}, block.place
        assert block.words.get("skip") != "", block.place


@pytest.mark.parametrize(
    ("command", "cut"),
    [
        ("make train RUN=a", f'make train RUN=a ARGS="{check.FEW_STEPS} 1"'),
        ("make resume ARGS=\"--x '{a: b}'\"", f"make resume ARGS=\"--x '{{a: b}}' {check.FEW_STEPS} 2\""),
        (".venv/bin/cait fit --config FILE", f".venv/bin/cait fit --config FILE {check.FEW_STEPS} 1"),
        ("make eval RUN=a", "make eval RUN=a"),
    ],
)
def test_training_is_cut_to_a_few_steps(command: str, cut: str) -> None:
    assert check.few_steps(command) == cut


def test_a_sample_gets_the_numbers_that_are_printed() -> None:
    printed = "model  CaiT 6×96\nepoch 2/2  loss: 0.81  acc1: 94.1%  lr: 1e-05\n│ top-1 │  9.75 % │ ──── │\n"
    sample = "epoch 30/30 loss: 0.706 ... lr: 1e-05\n...\n│ top-1     │  99.44 % │ ── │\nno such line 3\n"
    now, missing = check.as_printed(sample, printed)
    assert now == "epoch 2/2  loss: 0.81  ...  lr: 1e-05\n...\n│ top-1 │  9.75 % │ ──── │\nno such line 3\n"
    assert missing == ["no such line 3"]
    printed = "│ 0 │ 97 │\n│ 1 │ 98 │\n"
    assert check.as_printed("│ 0 │ 98 │\n│ 1 │ 97 │\n", printed)[0] == printed
    printed = "a/0001.png 91 %\na/0002.png 92 %\na/0003.png 93 %\n"
    assert check.as_printed("a/0002.png 7 %\na/0003.png 8 %\n", printed)[0] == printed[16:]


def test_a_command_that_is_not_run_is_parsed(monkeypatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr("sys.argv", ["cait"])
    fit = "-m cait fit --config configs/digits.yaml --data.root DIR"
    assert check.parse(f"torchrun {fit}; fi") == "settings parsed"
    assert check.parse("scontrol requeue 1") == "not parsed"
    with pytest.raises(ValueError, match=r"did you mean --model\.lr\?"):
        check.parse(f"srun {fit} --model.lrr 1")
    with pytest.raises(ValueError, match="No rule to make target"):
        check.parse("make no-such-target")


def test_a_command_that_fails_is_told_with_its_output() -> None:
    assert check.run("echo fine") == "fine\n"
    with pytest.raises(ValueError, match="exit code 3\nwhy"):
        check.run("echo why; exit 3")


@pytest.mark.parametrize("path", check.NOTEBOOKS, ids=str)
def test_a_notebook_has_the_outputs_of_one_run(path: Path) -> None:
    text = (REPO / path).read_text()
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    first, *others = cells
    assert first["outputs"] == []  # it sets up
    pictures = 0
    for cell in others:
        assert cell["outputs"], cell["id"]
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "execute_result"), cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            pictures += "image/png" in output.get("data", {})
            printed = "".join([*output.get("text", []), *output.get("data", {}).get("text/plain", [])])
            assert not OF_A_MACHINE.search(printed), printed
            assert not set("\r\x1b") & set(printed), "progress bars, or colours"
    assert pictures


def test_a_path_of_a_machine_is_found_in_an_output() -> None:
    assert OF_A_MACHINE.search("/tmp/x/logs/a: warning")
    assert OF_A_MACHINE.search('  File "/usr/lib/python3/a.py"')
    assert not OF_A_MACHINE.search("logs/notebook/metrics.csv, epoch 1/10, https://site.org/a/b, val/acc1, ./a/b/c")


def test_a_notebook_is_valid_and_a_cell_that_fails_is_told(tmp_path: Path) -> None:
    """With Jupyter's own parts."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    for path in check.NOTEBOOKS:
        nbformat.validate(nbformat.read(REPO / path, as_version=4))
    cells = [nbformat.v4.new_code_cell(code) for code in ("print(6 * 7)", "1 / 0")]
    for count in (1, 2):
        nbformat.write(nbformat.v4.new_notebook(cells=cells[:count]), tmp_path / f"{count}.ipynb")
    check.execute(tmp_path / "1.ipynb")
    (cell,) = nbformat.read(tmp_path / "1.ipynb", as_version=4).cells
    assert [output.text for output in cell.outputs] == ["42\n"]
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        check.execute(tmp_path / "2.ipynb")

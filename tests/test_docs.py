"""The documentation: its links lead somewhere, its commands can be found, and its notebook is of one run."""

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


@pytest.mark.parametrize("path", check.NOTEBOOKS, ids=str)
def test_a_notebook_has_the_outputs_of_one_run(path: Path) -> None:
    text = (REPO / path).read_text()
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    is_page = path.with_suffix(".md") in check.PAGES_AS_NOTEBOOKS
    assert is_page or all(cell["outputs"] for cell in cells[1:])  # the first one sets up
    pictures = 0
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "execute_result"), cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            pictures += "image/png" in output.get("data", {})
            printed = "".join([*output.get("text", []), *output.get("data", {}).get("text/plain", [])])
            assert not OF_A_MACHINE.search(printed), printed
            assert not set("\r\x1b") & set(printed), "progress bars, or colors"
    assert is_page or pictures

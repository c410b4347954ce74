"""The documentation: its links lead somewhere, its commands can be found."""

import os
import re
from pathlib import Path

import pages
import pytest
from harness import REPO

PAGES = sorted({*REPO.glob("*.md"), *pages.pages()})
EXTRAS, CONTRIB = REPO / "src/cait/extras", REPO / "contrib"


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings."""
    return {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)", text, re.M)
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
    found = list(pages.blocks(pages.pages()))
    assert sum(len(block.commands) for block in found if block.language == "bash") > 50
    for block in found:
        assert block.words.keys() <= {"skip", "file"}, block.place
        assert block.words.get("skip") != "", block.place

"""The documentation: its links lead somewhere, its commands can be found."""

import os
import re
from pathlib import Path

import check
import pages
import pytest
import stand_ins
from harness import REPO

PAGES = sorted({*REPO.glob("*.md"), *pages.pages()})
EXTRAS, CONTRIB = REPO / "src/cait/extras", REPO / "contrib"


def anchors(text):
    """What GitHub calls the headings."""
    return {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)", text, re.M)
    }


def is_of_a_removed_extra(target):
    """Whether a link leads into a folder of cait/extras or contrib that is not there: any of them may be removed."""
    places = [target, *target.parents]
    return any(path.parent in (EXTRAS, CONTRIB) and not path.exists() for path in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = Path(os.path.normpath(page.parent / path)) if path else page
            if is_of_a_removed_extra(target):
                continue
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


def test_pages_have_commands_and_every_skipped_one_a_reason():
    found = list(pages.blocks(pages.pages()))
    assert sum(len(block.commands) for block in found if block.language == "bash") > 50
    for block in found:
        assert block.words.keys() <= {"skip", "file", "small", "epochs", "fails"}, block.place
        assert block.words.get("skip") != "", block.place
        stand_in = block.words.get("small")
        assert stand_in is None or (
            stand_in in block.text and stand_in in {*stand_ins.FOLDERS, *stand_ins.WEIGHTS}
        ), block.place


def test_a_command_on_what_stands_in_for_a_readers_own_is_cut_to_two_images():
    train = "cait fit --data.root DIR"
    assert check.few_steps(train, {"small": "DIR"}).endswith(stand_ins.CUT)
    assert check.few_steps("cait eval run", {"small": "DIR"}) == f"cait eval run {stand_ins.CUT}"
    assert check.few_steps("cait eval run", {}) == "cait eval run"
    assert check.few_steps(train, {"epochs": "3"}) == f"{train} {check.FEW_STEPS} 3"
    with pytest.raises(ValueError, match="exit code 0"):
        check.run("true", 2)
    assert check.run("echo no; exit 2", 2) == "no\n"

"""The documentation: its links lead somewhere, its commands can be found, and `make docs-check` tells a wrong one."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from harness import REPO

spec = importlib.util.spec_from_file_location("check", REPO / "docs" / "check.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
PAGES = sorted({*REPO.glob("*.md"), *check.pages()})
EXTRAS = REPO / "src/cait/extras"


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings."""
    return {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)", text, re.M)
    }


def is_of_a_removed_extra(target: Path) -> bool:
    """Whether a link leads into a folder of cait/extras that is not there: any of them may be removed."""
    path = Path(os.path.normpath(target))
    return path.is_relative_to(EXTRAS) and not (EXTRAS / path.relative_to(EXTRAS).parts[0]).exists()


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
    found = list(check.blocks())
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
    assert check.run("echo fine") == "ok"
    with pytest.raises(ValueError, match="exit code 3\nwhy"):
        check.run("echo why; exit 3")

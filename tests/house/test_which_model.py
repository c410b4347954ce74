"""docs/which_model.md: each figure is the one of the file that it names, and timm's have their addresses."""

import re

from harness import REPO, parsed

PAGE = (REPO / "docs/which_model.md").read_text()
MEASURED = (REPO / "benchmarks/which_model.md").read_text().splitlines()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
PUBLISHED = parsed(REPO / "benchmarks/which_model.csv")
RESULTS = re.compile(
    r"https://github\.com/huggingface/pytorch-image-models/blob/[0-9a-f]{40}/results/[\w-]+\.csv"
)
FIGURES = ["top-1", "parameters", "inference", "training"]
"""The columns of the published table, in their order."""


VALUES = {(row["model"], row["figure"]): float(row["value"]) for row in PUBLISHED}


def test_published_figures_are_quoted_exactly():
    rows = re.findall(r"^\| `.*", SECTIONS["Compare accuracy and speed that timm published"], re.M)
    assert len(rows) > 8
    base = ""
    for row in rows:
        model, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
        # what the rows below it are compared with
        base = model if model.startswith("cait_") else base
        for figure, cell in zip(FIGURES, cells, strict=True):
            number, _, ratio = cell.partition(", ")
            value = VALUES.get((model, figure))
            assert value == (None if number == "–" else float(number.replace(",", ""))), row
            if value is None or figure in FIGURES[:2] or model == base:
                assert ratio == "", row
            else:
                assert ratio == f"{value / VALUES[base, figure]:.1f}×", row


def test_published_figures_have_an_address_that_the_page_gives():
    for row in PUBLISHED:
        assert RESULTS.fullmatch(row["source"]), row
    of_the_table = {row["source"] for row in PUBLISHED if row["figure"] != "inference, amp"}
    assert of_the_table == set(RESULTS.findall(PAGE))


def test_the_measured_table_is_the_committed_one():
    rows = re.findall(r"^\|.*", SECTIONS["Compare time and memory measured here"], re.M)
    assert len(rows) > 6
    for row in rows:
        assert row in MEASURED

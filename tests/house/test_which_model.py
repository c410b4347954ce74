"""docs/which_model.md: each figure is the one of the file that it names, and timm's have their addresses."""

import csv
import re

from harness import REPO

PAGE = (REPO / "docs/which_model.md").read_text()
MEASURED = (REPO / "benchmarks/which_model.md").read_text().splitlines()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
with (REPO / "benchmarks/which_model.csv").open() as file:
    PUBLISHED = list(csv.DictReader(file))
RESULTS = re.compile(
    r"https://github\.com/huggingface/pytorch-image-models/blob/[0-9a-f]{40}/results/[\w-]+\.csv"
)
FIGURES = ["top-1", "parameters", "inference", "training"]
"""The columns of the published table, in their order."""


def published(model: str, figure: str) -> float | None:
    found = [row["value"] for row in PUBLISHED if (row["model"], row["figure"]) == (model, figure)]
    return float(found[0]) if found else None


def test_published_figures_are_quoted_exactly() -> None:
    rows = re.findall(r"^\| `.*", SECTIONS["Compare accuracy and speed that timm published"], re.M)
    assert len(rows) > 8
    base = ""
    for row in rows:
        model, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
        # what the rows below it are compared with
        base = model if model.startswith("cait_") else base
        for figure, cell in zip(FIGURES, cells, strict=True):
            value, _, ratio = cell.partition(", ")
            found = published(model, figure)
            assert found == (None if value == "–" else float(value.replace(",", ""))), (
                model,
                figure,
            )
            compared = found is not None and figure in FIGURES[2:] and model != base
            assert ratio == (f"{found / published(base, figure):.1f}×" if compared else ""), (
                model,
                figure,
            )


def test_published_figures_have_an_address_that_the_page_gives() -> None:
    for row in PUBLISHED:
        assert RESULTS.fullmatch(row["source"]), row
    of_the_table = {row["source"] for row in PUBLISHED if row["figure"] != "inference, amp"}
    assert of_the_table == set(RESULTS.findall(PAGE))


def test_the_measured_table_is_the_committed_one() -> None:
    rows = re.findall(r"^\|.*", SECTIONS["Compare time and memory measured here"], re.M)
    assert len(rows) > 6
    for row in rows:
        assert row in MEASURED

"""docs/which_model.md: each figure is the one of the file that it names, and timm's have their addresses."""

import csv
import re

import pytest
from harness import REPO

PAGE = (REPO / "docs/which_model.md").read_text()
MEASURED = (REPO / "benchmarks/which_model.md").read_text().splitlines()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
with (REPO / "benchmarks/which_model.csv").open() as file:
    PUBLISHED = list(csv.DictReader(file))
RESULTS = re.compile(r"https://github\.com/huggingface/pytorch-image-models/blob/[0-9a-f]{40}/results/[\w-]+\.csv")


def published(model: str, figure: str, size: str = "") -> float:
    found = [r["value"] for r in PUBLISHED if (r["model"], r["figure"]) == (model, figure) and size in r["img_size"]]
    return float(found[0]) if found else float("nan")


def quoted() -> list[tuple[str, list[str], str]]:
    """Rows of the published figures: the model, its cells, and the CaiT that it is compared with."""
    rows, base = [], ""
    for line in re.findall(r"^\| `.*", SECTIONS["Compare accuracy and speed that timm published"], re.M):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = name.strip("`")
        base = name if name.startswith("cait_") else base
        rows.append((name, cells, base))
    return rows


def times(model: str, base: str, figure: str) -> float:
    return published(model, figure) / published(base, figure)


@pytest.mark.parametrize("figure", ["top-1", "parameters", "inference", "training"])
def test_published_figures_are_quoted_exactly(figure: str) -> None:
    column = ["top-1", "parameters", "inference", "training"].index(figure)
    rows = quoted()
    assert len(rows) > 8
    for model, cells, base in rows:
        value, _, ratio = cells[column].partition(", ")
        if value == "–":
            assert not [row for row in PUBLISHED if (row["model"], row["figure"]) == (model, figure)]
            continue
        assert float(value.replace(",", "")) == published(model, figure), model
        assert ratio == (f"{times(model, base, figure):.1f}×" if column > 1 and model != base else ""), model


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

"""What the ten models and the ablations cost, against timm's models and the paper's tables."""

from __future__ import annotations

import re

import pytest

from cait.cli import main
from cait.extras.paper.zoo import Cost, cost, models
from cait.model.config import VARIANTS

# GMACs at 224 and 384 counted on timm's models, M-48 at 448 in place of 384 at the end.
GMACS = {
    "xxs24": (2.523, 9.599),
    "xxs36": (3.756, 14.313),
    "xs24": (5.390, 19.241),
    "xs36": (8.030, 28.700),
    "s24": (9.327, 32.110),
    "s36": (13.902, 47.908),
    "s48": (18.477, 63.706),
    "m24": (35.776, 115.868),
    "m36": (53.367, 172.944),
    "m48": (70.959, 329.108),
}
# The paper's GFLOPs, which are multiply-adds, at the same resolutions; M-48 has only the second.
PUBLISHED = {
    "xxs24": (2.5, 9.5),
    "xxs36": (3.8, 14.2),
    "xs24": (5.4, 19.3),
    "xs36": (8.1, 28.8),
    "s24": (9.4, 32.2),
    "s36": (13.9, 48.0),
    "s48": (18.6, 63.8),
    "m24": (36.0, 116.1),
    "m36": (53.7, 173.3),
    "m48": (None, 329.6),
}


SIZES = {name: (224, 448 if name == "m48" else 384) for name in VARIANTS}


@pytest.fixture(scope="module")
def costs() -> dict[tuple[str, int], Cost]:
    return {key: cost(rows[0].network()) for key, rows in models().items()}


def by_size(table: dict[str, tuple[float | None, float]]) -> dict[tuple[str, int], float]:
    """The known figures of a table by model and resolution."""
    cells = [((name, size), figure) for name in table for size, figure in zip(SIZES[name], table[name], strict=True)]
    return {key: figure for key, figure in cells if figure is not None}


def test_multiply_adds_are_those_counted_on_timms_models(costs: dict[tuple[str, int], Cost]) -> None:
    counted = by_size(GMACS)
    assert costs.keys() == counted.keys()
    for key, figure in counted.items():
        assert costs[key].gmacs == pytest.approx(figure, rel=0.005)


def test_one_token_more_reproduces_sixteen_of_the_nineteen_published_figures(
    costs: dict[tuple[str, int], Cost],
) -> None:
    published = by_size(PUBLISHED)
    assert {key: rows[0].gflops for key, rows in models().items() if rows[0].gflops} == published
    exact = {key for key, figure in published.items() if round(costs[key].gmacs_published, 1) == figure}
    assert set(published) - exact == {("xxs24", 384), ("xxs36", 384), ("s36", 224)}
    assert sum(round(costs[key].gmacs, 1) == figure for key, figure in published.items()) == 4


def test_zoo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zoo"])
    shown = capsys.readouterr().out
    assert re.search(r"xxs24 +│ +224 │ +11,956,264 │ +2\.523 │ +2\.5 │ +2\.5 │ +77\.6 │ +78\.4", shown)
    assert re.search(r"m48 +│ +448 │ +356,460,520 │ .* 86\.5", shown)

"""What the ten models and the ablations cost, against timm's models and the paper's tables."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cait
from cait.cli import main
from cait.extras.paper.cost import cost
from cait.extras.paper.zoo import zoo
from cait.model.config import VARIANTS, variant_config

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


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], dict]:
    return {(row["model"], row["img_size"]): row for row in zoo()}


def test_multiply_adds_are_those_counted_on_timms_models(rows: dict[tuple[str, int], dict]) -> None:
    assert {model for model, _ in rows} == set(VARIANTS)
    for name, (small, large) in GMACS.items():
        assert rows[name, 224]["gmacs"] == pytest.approx(small, rel=0.005)
        assert rows[name, 448 if name == "m48" else 384]["gmacs"] == pytest.approx(large, rel=0.005)


@pytest.mark.parametrize(
    "fields",
    [
        dict(name="xxs24"),
        dict(name="s24", class_token_at=5),
        dict(name="s24", global_pool="avg", depth_token_only=0),
    ],
    ids=str,
)
def test_counting_one_block_for_all_is_counting_the_whole(fields: dict) -> None:
    with torch.device("meta"):
        model = cait.create_model(**fields).eval().requires_grad_(False)
        images = torch.empty(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert cost(variant_config(**fields)).gmacs == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-12)


def test_one_token_more_reproduces_sixteen_of_the_nineteen_published_figures(
    rows: dict[tuple[str, int], dict],
) -> None:
    sizes = {name: (224, 448 if name == "m48" else 384) for name in PUBLISHED}
    published = {
        (name, size): figure
        for name, figures in PUBLISHED.items()
        for size, figure in zip(sizes[name], figures, strict=True)
        if figure is not None
    }
    assert {key: row["gflops_published"] for key, row in rows.items() if row["gflops_published"]} == published
    exact = {key for key, figure in published.items() if round(rows[key]["gmacs_published_rule"], 1) == figure}
    assert set(published) - exact == {("xxs24", 384), ("xxs36", 384), ("s36", 224)}
    assert sum(round(rows[key]["gmacs"], 1) == figure for key, figure in published.items()) == 4


def test_zoo_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zoo", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 20
    assert listed[0]["parameters"] == 11_956_264
    main(["zoo"])
    shown = capsys.readouterr().out
    assert "356,460,520" in shown
    assert "86.5" in shown

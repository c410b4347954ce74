"""The table of the recipe beside other learners: its networks, its rows, and that it goes on where it stopped."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import rivals
import torch

from cait.model.network import build


@pytest.mark.parametrize("learner", rivals.RATES)
@pytest.mark.parametrize("size", [16, 28, 48, 64])
def test_each_network_takes_images_of_any_size_of_the_recipe(learner: str, size: int) -> None:
    settings = rivals.network(learner, size)
    network = build(settings["name"], size, 7, **settings.get("fields", {})).eval()
    with torch.inference_mode():
        assert network(torch.zeros(2, 3, size, size)).shape == (2, 7)


def bench(tmp_path: Path) -> rivals.Bench:
    return rivals.Bench(tmp_path, tmp_path, tmp_path / "rows.csv", 60, queue.Queue())


def test_rows_are_kept_and_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = bench(tmp_path)
    first.add(folder="a", learner="ViT", seed=rivals.PLAN, epochs=9, seconds="1.00")
    for seed, score in ((0, 80.0), (1, 90.0)):
        first.add(folder="a", learner="ViT", seed=seed, epochs=9, seconds=60, acc1=score, acc1_macro=score)
    again = bench(tmp_path)
    assert again.done.keys() == {("a", "ViT", seed) for seed in (rivals.PLAN, "0", "1")}
    assert again.plan("a", "ViT") == 9
    again.add(folder="a", learner="ViT", seed=2, epochs=9, seconds=60, acc1=85, acc1_macro=85)
    assert bench(tmp_path).done[("a", "ViT", "2")]["acc1"] == "85"
    row = next(line for line in rivals.table(list(first.done.values()), ["a"]) if line.startswith("| ViT"))
    assert row == "| ViT | **85.0** ± 7.1 (60 s, 9 epochs) | 85.0 |"

"""The table of the recipe beside other learners: its networks, its rows, and that it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pretrained
import pytest
import rivals
import torch


@pytest.mark.parametrize("size", [16, 28, 48, 64])
def test_the_cnn_takes_images_of_any_size_of_the_recipe(size: int) -> None:
    with torch.inference_mode():
        assert rivals.cnn(size, 7).eval()(torch.zeros(2, 3, size, size)).shape == (2, 7)


def bench(tmp_path: Path) -> rivals.Bench:
    return rivals.Bench(tmp_path, tmp_path, tmp_path / "rows.csv", 60)


def test_rows_are_kept_and_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = bench(tmp_path)
    for seed, score, took in ((0, 80.0, 60), (1, 90.0, 72)):
        row = dict(folder="a", learner="ViT", seed=seed, epochs=9, seconds=took)
        first.add(**row, acc1=score, acc1_macro=score)
    again = bench(tmp_path)
    assert again.done.keys() == {("a", "ViT", "0"), ("a", "ViT", "1")}
    again.score("a", "ViT", 0)  # there is no such folder: it would fail
    again.add(folder="a", learner="ViT", seed=2, epochs=9, seconds=66, acc1=85, acc1_macro=85)
    rows = list(bench(tmp_path).done.values())
    assert rows[-1]["acc1"] == "85"
    row = next(line for line in rivals.table(rows, ["a"]) if line.startswith("| ViT"))
    assert row == "| ViT | **85.0** ± 5.0 (66 s) | 85.0 |"


def test_from_the_same_weights_as_many_epochs_as_fit_and_as_many_for_the_next_seed(tmp_path: Path) -> None:
    known = tmp_path, tmp_path, tmp_path / "rows.csv", 3, "net", tmp_path / "net.pth", {}
    trials, tried = pretrained.Trials(*known), []

    def run(epochs: int, place: Path) -> dict[str, float]:
        tried.append(epochs)
        return {"seconds": 20 + 10 * epochs, "pace": 10 if epochs > 2 else 12}

    row = dict(zip(pretrained.KEYS, ("a", "timm", "3", "net", "0"), strict=True))
    found, place = trials.fitted(row, tmp_path, run)
    assert (tried, found["epochs"], place.name) == ([2, 13, 16], 16, "16")
    trials.add(**row, **found, acc1=80, acc1_macro=70)
    again = pretrained.Trials(*known)
    again.fitted(row | {"seed": "1"}, tmp_path, run)
    assert tried[3:] == [16]
    again.add(**row | {"seed": "1"}, acc1=90, acc1_macro=80, step0=60)
    table = [*rivals.table(list(again.done.values()), ["a"], ["timm"], pretrained.classes)]
    assert table[-1] == "| timm | **85.0** ± 7.1 (75.0 ± 7.1; step 0: 60.0) | 85.0 |"

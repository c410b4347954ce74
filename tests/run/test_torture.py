"""benchmarks/torture.py, shortened: it kills, resumes, and tells a run that ends alike from one that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torture


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=8", "--trainer.limit_val_batches=2"]
    monkeypatch.setattr(torture, "RECIPE", [*torture.RECIPE, *brief])
    # The seed kills at half the time that a run takes.
    monkeypatch.setattr(sys, "argv", ["torture", "--kills=1", "--seed=19", f"--out={tmp_path}/torture.md"])
    torture.main()
    said = capsys.readouterr().out
    assert "left alone: " in said
    assert "kill 1: killed-" in said
    verdict = "seed 19: every run ended with the same bits\n"
    assert said.endswith(verdict)
    assert (tmp_path / "torture.md").read_text().endswith(verdict)


def test_one_bit_is_told() -> None:
    a = {"weights": torch.tensor([1.0, float("nan")]), "rows": [1, float("nan"), "x"]}
    b = {"weights": a["weights"].clone(), "rows": [1, float("nan"), "x"]}
    assert torture.same(a, b)
    b["weights"].view(torch.int32)[0] ^= 1
    assert not torture.same(a, b)
    assert not torture.same(a["rows"], [1, float("nan"), "y"])

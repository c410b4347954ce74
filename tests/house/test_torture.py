"""benchmarks/torture.py kills, resumes and compares."""

import sys
from pathlib import Path

import pytest
import torture


@pytest.mark.slow
def test_the_torture_kills_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brief = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=8",
        "--trainer.limit_val_batches=2",
    ]
    monkeypatch.setattr(torture, "RECIPE", [*torture.RECIPE, *brief])
    # The seed kills at half the time that a run takes.
    monkeypatch.setattr(
        sys, "argv", ["torture", "--kills=1", "--seed=19", f"--out={tmp_path}/torture.md"]
    )
    torture.main()
    said = capsys.readouterr().out
    assert "left alone: " in said
    assert "kill 1: killed-" in said
    verdict = "seed 19: every run ended with the same bits\n"
    assert said.endswith(verdict)
    assert (tmp_path / "torture.md").read_text().endswith(verdict)

"""benchmarks/torture.py kills, resumes and compares."""

import sys

import pytest
import torture


@pytest.mark.slow
def test_the_torture_kills_and_resumes(tmp_path, monkeypatch, capsys):
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
    printed = capsys.readouterr().out
    assert "left alone: " in printed
    assert "kill 1: killed-" in printed
    verdict = "seed 19: every run ended with the same bits\n"
    assert printed.endswith(verdict)
    assert (tmp_path / "torture.md").read_text().endswith(verdict)

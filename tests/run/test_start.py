"""A start that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import DEVICES, REPO

from cait.cli import main
from cait.run import rundir


def test_a_failed_start_leaves_nothing(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    small = ["--model.fields.embed_dim=32", "--model.fields.depth=1", "--trainer.max_steps=2", "--data.num_workers=0"]
    fit = ["fit", f"--config={REPO / 'configs/digits.yaml'}", *DEVICES[:1], *small, f"--data.root={digits_root}"]

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        assert stop.value.code == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    def files() -> list[Path]:
        return sorted(tmp_path.rglob("*"))

    assert "do not fill one batch of 100000" in refused(*fit, "--data.batch_size=100000")
    assert "nowhere.pth do not exist" in refused(*fit, "--run_name=b", "--model.weights=nowhere.pth")
    assert "`val_check_interval` (99999) must be less" in refused(*fit, "--trainer.val_check_interval=99999")
    assert files() == [tmp_path / "logs"]
    (tmp_path / "logs/a").mkdir()
    (tmp_path / "logs/a/notes.txt").touch()
    assert "class_names has 2 names" in refused(*fit, "--run_name=a", "--data.class_names=[a,b]")
    assert [path.name for path in (tmp_path / "logs/a").iterdir() if path.suffix] == ["notes.txt"]

    main([*fit, "--run_name=done"])
    assert "see its mistakes" in capfd.readouterr().out
    assert (tmp_path / "logs/done" / rundir.FINISHED).exists()
    before = files()
    assert "seed was 0, is 5" in refused("resume", "done", "--trainer.max_steps=3", "--seed_everything=5")
    assert files() == before

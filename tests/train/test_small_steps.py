"""What keeps a step of a small network short: metrics are handed on only where they are logged."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness import SMALL, rows
from lightning.pytorch import Callback, LightningModule, Trainer

from cait.cli import main


class Record(Callback):
    """The loss and the accuracy of each step."""

    figures: ClassVar[list[list[float]]] = []
    crash_after: ClassVar[int] = -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.figures.append(pl_module.figures.tolist())
        if len(self.figures) == self.crash_after:
            raise ZeroDivisionError


@pytest.fixture
def fit(digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Record, "figures", [])
    settings = [*SMALL, f"--data.root={digits_root}", "--data.num_workers=0"]
    return lambda *more: main(["fit", *settings, "--trainer.callbacks+=test_small_steps.Record", *more])


def test_an_epochs_line_has_the_mean_of_its_steps_also_after_a_resume(
    fit: Any, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=12", "--model.warmup_epochs=0"]
    fit(*short, "--run_name=whole")
    lines = re.findall(r"epoch \d/2.*acc1: [\d.]+%", capfd.readouterr().out)
    steps = len(Record.figures) // 2
    for line, figures in zip(lines, (Record.figures[:steps], Record.figures[steps:]), strict=True):
        loss, acc1 = (statistics.mean(values) for values in zip(*figures, strict=True))
        assert f"loss: {loss:.3f}  acc1: {acc1:.1f}%" in line

    logged = [row for row in rows(tmp_path / "logs/whole") if row["train/loss"]]
    assert [int(row["step"]) for row in logged] == list(range(4, 2 * steps, 5))
    for row in logged:
        assert [float(row["train/loss"]), float(row["train/acc1"])] == Record.figures[int(row["step"])]
        assert float(row["train/grad_norm"]) > 0

    monkeypatch.setattr(Record, "crash_after", 3 * steps + 5)
    with pytest.raises(ZeroDivisionError):
        fit(*short, "--run_name=cut", "--save_every_n_steps=3")
    assert lines[1] not in capfd.readouterr().out
    main(["resume", "cut"])
    assert lines[1] in capfd.readouterr().out

"""Classes that have moved since a run began are found where they are now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import SMALL, Cait, checkpoint, rows

from cait import plugins
from cait.plugins import load

AVERAGED = ["--trainer.callbacks+=cait.train.ema.EMA", "--trainer.callbacks.decay=0.5"]


def average(run: Path) -> torch.Tensor:
    """The head's averaged weights in a run's checkpoint."""
    return checkpoint(run)["callbacks"]["EMA"]["head.weight"]


def test_a_class_of_an_earlier_version_is_todays(cait: Cait, tmp_path: Path) -> None:
    run = tmp_path / "logs/run"
    done = cait("fit", *SMALL, *AVERAGED, "--run_name=run", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1")
    assert done.returncode == 0, done.stderr
    before = average(run)
    text = (run / "config.yaml").read_text()
    assert text.count("cait.train.ema.EMA") == 1
    (run / "config.yaml").write_text(text.replace("cait.train.ema.EMA", "cait.callbacks.ema.EMA"))
    resumed = cait("resume", "run", "--trainer.max_steps=4")
    assert resumed.returncode == 0, resumed.stderr
    assert "left out" not in resumed.stdout + resumed.stderr
    assert [row["step"] for row in rows(run) if row["train/loss"]] == ["0", "1", "2", "3"]
    assert not torch.equal(average(run), before)  # it goes on
    assert "class_path: cait.train.ema.EMA" in (run / "config.yaml").read_text()


def test_each_module_that_has_moved_is_where_it_is_said_to_be() -> None:
    moved = plugins.merged("MOVED")
    for before, now in moved.items():
        assert load(f"{now}:__name__") == now
        with pytest.raises(ModuleNotFoundError):
            load(f"{before}:__name__")

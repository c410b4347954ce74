"""Early stopping: where a run ends, after a kill too, and what is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from harness import SMALL, Cait
from lightning.pytorch.callbacks import EarlyStopping

from cait.errors import UserError
from cait.extras.early_stop.callback import EarlyStop

FLAT = [*SMALL, "--model.lr=0", "--model.warmup_epochs=0", "--model.min_lr=0", "--trainer.limit_train_batches=2"]
"""Nothing learns, so no validation is better than the first."""


def last(folder: Path) -> dict:
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)


def test_a_run_ends_after_its_patience_and_a_higher_one_goes_on(cait: Cait, tmp_path: Path) -> None:
    done = cait("fit", *FLAT, "--run_name=flat", "--early_stop.patience=2", "--trainer.max_epochs=9")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs/flat"
    assert last(run)["global_step"] == 3 * 2  # the first validation is the best
    assert "stopped early: val/acc1 has not got better than" in done.stdout + done.stderr
    again = cait("resume", "flat")
    assert (again.returncode, last(run)["global_step"]) == (0, 6), again.stderr
    more = cait("resume", "flat", "--early_stop.patience=3")
    assert (more.returncode, last(run)["global_step"]) == (0, 8), more.stderr


def test_a_kill_in_the_epoch_that_decides_changes_nothing(cait: Cait, tmp_path: Path) -> None:
    settings = [*FLAT, "--early_stop.patience=1", "--trainer.max_epochs=9", "--run_name=flat"]
    killed = cait("fit", *settings, "--trainer.callbacks+=recorder.KilledOnce")
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stderr
    run = tmp_path / "logs/flat"
    assert last(run)["global_step"] == 4
    assert cait("resume", "flat").returncode == 0
    assert last(run)["global_step"] == 4


def test_it_waits_as_lightnings_does() -> None:
    ours, theirs = EarlyStop("a", "max", 3, 0.5), EarlyStopping("a", 0.5, 3, mode="max")
    for value in (1.0, 1.2, 2.0, 2.5, 2.1, 1.0, 3.0, 3.1, 3.2, 3.3):
        current = torch.tensor(value)
        assert ours._evaluate_stopping_criteria(current)[0] == theirs._evaluate_stopping_criteria(current)[0]
        assert (ours.wait_count, ours.best_score) == (theirs.wait_count, theirs.best_score)
    assert ours.wait_count >= 3


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
    ("values", "stopped_at", "words"),
    [
        ("nan 1 2 3 4", None, ""),
        ("inf 1 2 3 4", None, ""),
        ("-inf 1 2 3 4", None, ""),
        ("1 nan 2 inf 3", None, ""),
        ("nan nan nan", 1, "val/x was nan in 2 validations; a higher --early_stop.patience goes on"),
        ("1 nan inf 2", 2, "val/x has not got better than 1 in 2 validations"),
        ("1 -inf nan 2", 2, "val/x has not got better than 1 in 2 validations"),
    ],
)
def test_what_is_not_finite_is_not_better(values: str, stopped_at: int | None, words: str, mode: str) -> None:
    ours = EarlyStop("val/x", mode, 2)
    sign = 1 if mode == "max" else -1
    stops = [ours._evaluate_stopping_criteria(sign * torch.tensor(float(value))) for value in values.split()]
    assert next((place for place, (stop, _) in enumerate(stops) if stop), None) == stopped_at
    if stopped_at is not None:
        assert words.replace("than 1", f"than {sign}") in str(stops[stopped_at][1])


@pytest.mark.parametrize(("patience", "delta"), [(0, 0.0), (-1, 0.0), (1, -0.1)])
def test_numbers_out_of_range_are_refused(patience: int, delta: float) -> None:
    with pytest.raises(UserError, match=r"early_stop\.patience must be at least 1"):
        EarlyStop("val/acc1", "max", patience, delta)


def test_without_it_a_run_trains_to_its_end(cait: Cait, tmp_path: Path) -> None:
    assert cait("fit", *FLAT, "--run_name=whole", "--trainer.max_epochs=4").returncode == 0
    assert last(tmp_path / "logs/whole")["global_step"] == 8

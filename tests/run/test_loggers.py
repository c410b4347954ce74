"""metrics.csv through resumes and crashes."""

import csv
from pathlib import Path

import pytest

from cait.run.loggers import RunCSVLogger

WHOLE = "epoch,step,train/loss,val/acc1\r\n0,0,2.5,\r\n0,1,2.25,\r\n0,1,,12.5\r\n1,2,2.0,\r\n"


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("torn", ["", "1", "1,3,1.", "1,3,1.5"])
def test_rows_before_the_checkpoint_are_kept_even_of_a_torn_file(torn: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE + torn, newline="")
    logger = RunCSVLogger(tmp_path, first_step=3)
    _ = logger.experiment
    assert (tmp_path / "metrics.csv").read_bytes().decode() == WHOLE  # before anything new is logged
    logger.log_metrics({"epoch": 1, "train/loss": 1.5}, step=3)
    assert steps(tmp_path) == [0, 1, 1, 2, 3]
    logger.log_metrics({"epoch": 1, "val_ema/acc1": 50.0}, step=3)  # a new column
    assert steps(tmp_path) == [0, 1, 1, 2, 3, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_crash_in_rewriting_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE, newline="")

    def crash(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(csv, "writer", crash)
    with pytest.raises(OSError, match="full"):
        _ = RunCSVLogger(tmp_path, first_step=3).experiment
    assert (tmp_path / "metrics.csv").read_bytes().decode() == WHOLE


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE, newline="")
    RunCSVLogger(tmp_path).log_metrics({"epoch": 0, "train/loss": 2.0}, step=0)
    assert steps(tmp_path) == [0]

"""metrics.csv, continued from where a checkpoint stood."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from cait.run.loggers import RunCSVLogger, run_loggers

WHOLE = "epoch,step,train/loss,val/acc1\r\n0,0,2.5,\r\n0,1,2.25,\r\n0,1,,12.5\r\n1,2,2.0,\r\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(WHOLE, newline="")
    return path


def steps(file):
    with file.open(newline="") as text:
        return [int(row["step"]) for row in csv.DictReader(text)]


def resume(folder, step=3):
    logger = RunCSVLogger(folder, first_step=step)
    _ = logger.experiment
    return logger


@pytest.mark.parametrize("torn", ["", "1", "1,3,1.", "1,3,1.5"])
@pytest.mark.parametrize("by_a_spreadsheet", [False, True])
def test_rows_before_the_checkpoint_are_kept_even_of_a_torn_file(torn, by_a_spreadsheet, file):
    text = WHOLE
    if by_a_spreadsheet:
        text = "\ufeff" + WHOLE.replace(",", ";")
    file.write_text(text + torn, newline="")
    resume(file.parent)
    assert file.read_bytes().decode() == WHOLE


def test_a_resumed_run_adds_rows_and_columns(file):
    logger = resume(file.parent)
    logger.log_metrics({"epoch": 1, "train/loss": 1.5}, step=3)
    assert steps(file) == [0, 1, 1, 2, 3]
    logger.log_metrics({"epoch": 1, "val_ema/acc1": 50.0}, step=3)
    assert steps(file) == [0, 1, 1, 2, 3, 3]
    assert [*file.parent.iterdir()] == [file]


def test_rows_from_the_checkpoint_on_go(file):
    resume(file.parent, 1)
    assert steps(file) == [0]


def test_a_crash_in_rewriting_loses_no_row(file, monkeypatch):
    monkeypatch.delattr(csv, "writer")  # so that it fails where it writes
    with pytest.raises(AttributeError, match="writer"):
        resume(file.parent)
    assert file.read_bytes().decode() == WHOLE


class Own(CSVLogger):
    pass


@pytest.mark.parametrize("version", ["v1", 0, ""])
@pytest.mark.parametrize("logger_class", [CSVLogger, Own])
def test_a_csv_logger_of_ones_own_goes_on_with_its_file(logger_class, version, tmp_path):
    run_loggers(tmp_path / "run", first_step=2)
    for name in ("train/loss", "train/loss", "a, new one"):
        logger = logger_class(tmp_path, "mine", version)
        logger.log_metrics({name: 2.0}, step=7)
        logger.save()
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        columns = csv.DictReader(file)
        assert [row["train/loss"] for row in columns] == ["2.0", "2.0", ""]
        assert columns.fieldnames == ["a, new one", "step", "train/loss"]

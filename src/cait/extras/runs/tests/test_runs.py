"""`cait runs`: how far each run is, its best accuracy, and whether it runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from cait.cli import main
from cait.extras.runs.verb import describe

RUNS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text())
CONFIG = "trainer: {max_epochs: 3}\nmodel: {name: xxs24}\ndata: {root: data/digits}\n"
COLUMNS = "epoch,lr,step,train/loss,val/acc1,val_ema/acc1"
RUNNING = "a-long-name-of-a-run-that-is-training"


def write(folder, row):
    """What `describe` reads of a run, with the time of its last change."""
    folder.mkdir(parents=True)
    last = folder / "config.yaml"
    last.write_text(row.get("config", CONFIG))
    if "metrics" in row:
        last = folder / "metrics.csv"
        last.write_text(f"{COLUMNS}\n{row['metrics']}")
    os.utime(last, (row["changed"], row["changed"]))
    for name in row.get("files", []):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def logs(place):
    for name, row in RUNS.items():
        write(place / "logs" / name, row)
    return place / "logs"


def listed(capsys):
    main(["runs", "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_runs_are_listed(logs, capsys):
    with FileLock(logs / RUNNING / ".lock"):
        rows = listed(capsys)
        main(["runs"])
    printed = capsys.readouterr()
    assert [row["name"] for row in rows] == [*RUNS]
    for row in rows:
        expected = RUNS[row["name"]]
        assert row | expected["says"] == row
        assert re.search(f"^{expected['line']}", printed.out, re.M)
    assert [line.split()[0] for line in printed.out.splitlines()[1:]] == [*RUNS]
    assert "damaged: logs/broken/config.yaml" in printed.err


def test_a_run_that_nobody_holds_has_stopped(logs, capsys):
    with FileLock(logs / RUNNING / ".lock"):
        pass
    assert listed(capsys)[1]["state"] == "stopped"


@pytest.mark.usefixtures("place")
def test_where_there_are_no_runs_yet_it_says_how_to_start_one(capsys):
    main(["runs"])
    assert "`cait fit --config digits.yaml` starts one" in capsys.readouterr().out


ROWS = """epoch,lr,step,train/loss,val/acc1,val_ema/acc1,val/loss,val/acc1_macro
0,,8,,50.5,7.5,2.5,20.5
1,1e-3,14,2.0,,,,
1,,17,,70.5,7.25,1.5,30.5
2,,26,,60.5,7.75,1.75,40.5
"""


@pytest.mark.parametrize(
    ("settings", "metric", "best"),
    [
        ("", "val/acc1", 70.5),
        ("best_metric: val/acc1_macro", "val/acc1_macro", 40.5),
        ("best_metric: val/acc1\nbest_mode: min", "val/acc1", 50.5),
        ("best_metric: val/unknown", "val/unknown", None),
    ],
)
def test_the_best_is_by_the_metric_that_chose_the_checkpoint(settings, metric, best, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG + settings)
    (tmp_path / "metrics.csv").write_text(ROWS)
    row = describe(tmp_path)
    assert row["metric"] == metric
    assert row["best"] == best
    assert row["epochs"] == row["planned"] == 3


def test_a_run_that_is_planned_by_its_time_has_no_number_of_epochs_yet(tmp_path):
    (tmp_path / "config.yaml").write_text(f"{CONFIG}plan_minutes: 3.0\n")
    assert describe(tmp_path)["planned"] is None


def test_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch, capsys):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path)])
    assert capsys.readouterr().err == f"cait: error: cannot use {tmp_path}: Permission denied\n"

"""`cait runs`: how far each run is, its best accuracy, and whether it runs."""

import json
import os
import re
from pathlib import Path

import pytest
from filelock import FileLock
from harness import parsed

from cait.cli import main

RUNS = parsed(Path(__file__).with_name("runs.yaml"))
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
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, row in RUNS.items():
        write(tmp_path / "logs" / name, row)
    return tmp_path / "logs"


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

"""`cait runs`: how far each run is, its best accuracy, and whether it runs."""

import json
import os
import re
from pathlib import Path

import pytest
from filelock import FileLock

from cait.cli import main
from cait.extras.runs.verb import describe


def write_run(
    folder: Path, name: str, metrics: str, changed: float, checkpoint: bool = True, epochs: int = 3
) -> Path:
    run = folder / "logs" / name
    run.mkdir(parents=True)
    config = (
        f"trainer: {{max_epochs: {epochs}}}\nmodel: {{name: xxs24}}\ndata: {{root: data/digits}}\n"
    )
    (run / "config.yaml").write_text(config)
    if metrics:
        (run / "metrics.csv").write_text(
            f"epoch,lr,step,train/loss,val/acc1,val_ema/acc1\n{metrics}"
        )
        os.utime(run / "metrics.csv", (changed, changed))
    else:
        os.utime(run / "config.yaml", (changed, changed))
    if checkpoint:
        (run / "checkpoints").mkdir()
        (run / "checkpoints/last.ckpt").touch()
    return run


ROWS = "0,,8,,50.5,7.5,2.5,20.5\n1,1e-3,14,2.0,,,,\n1,,17,,70.5,7.25,1.5,30.5\n2,,26,,60.5,7.75,1.75,40.5\n"


@pytest.mark.parametrize(
    ("config", "metric", "best"),
    [
        ("", "val/acc1", 70.5),
        ("best_metric: val/acc1_macro", "val/acc1_macro", 40.5),
        ("best_metric: val/acc1\nbest_mode: min", "val/acc1", 50.5),
        ("best_metric: val/unknown", "val/unknown", None),
    ],
)
def test_the_best_is_by_the_metric_that_chose_the_checkpoint(
    config: str, metric: str, best: float | None, tmp_path: Path
) -> None:
    folder = write_run(tmp_path, "a", "", 1e9)
    names = "epoch,lr,step,train/loss,val/acc1,val_ema/acc1,val/loss,val/acc1_macro"
    (folder / "metrics.csv").write_text(f"{names}\n{ROWS}")
    with (folder / "config.yaml").open("a") as file:
        file.write(config)
    row = describe(folder)
    assert (row["metric"], row["best"], row["epochs"], row["planned"]) == (metric, best, 3, 3)
    with (folder / "config.yaml").open("a") as file:
        file.write("\nplan_minutes: 3.0")
    # the configuration says what was planned before the first validation
    assert describe(folder)["planned"] is None


def test_the_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["runs"])
    assert (
        "there are no runs in logs yet; `cait fit --config digits.yaml` starts one"
        in capsys.readouterr().out
    )
    ends = "0,,8,,nan,inf\n" + "".join(
        f"{epoch},,{epoch * 9 + 8},,{5 + epoch}.5,7.25\n" for epoch in (1, 2)
    )
    (write_run(tmp_path, "whole", ends, 1e9) / ".finished").touch()
    write_run(tmp_path, "cut", "0,1e-3,4,2.5,,\n0,,8,,40.5,\n1,1e-3,14,2.0,,\n1,1e", 2e9)
    write_run(tmp_path, "sweep/3", "", 3e8, checkpoint=False)
    # solved, and validated as step 0
    (write_run(tmp_path, "head", "0,,0,,90.5,\n", 2e8) / ".finished").touch()
    running = write_run(
        tmp_path, "a-long-name-of-a-run-that-is-training", "0,1e-3,4,2.5,,\n", 1.5e9
    )
    (running / "config.yaml").write_text(
        "model: {name: xxs24, fields: {depth: 6, embed_dim: 96}}\n"
    )
    (write_run(tmp_path, "broken", ends, 1e8) / "config.yaml").write_text("trainer: [\n")
    with FileLock(running / ".lock"):
        main(["runs", "--json"])
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        main(["runs"])
    told = capsys.readouterr()
    assert list(rows) == ["cut", running.name, "whole", "sweep/3", "head", "broken"]
    states = ["stopped", "running", "finished", "failed", "finished", "stopped"]
    assert [row["state"] for row in rows.values()] == states
    assert [row["epochs"] for row in rows.values()] == [1, 0, 3, 0, 0, 0]
    assert re.search(r"^head .* 0 +val/acc1 90\.50 .* finished", told.out, re.M)
    assert [rows["cut"][key] for key in ("model", "data", "planned", "best")] == [
        "xxs24",
        "data/digits",
        3,
        40.5,
    ]
    assert (rows["whole"]["best"], rows[running.name]["model"]) == (7.5, "CaiT 6×96")
    assert "damaged: logs/broken/config.yaml" in told.err
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == list(rows)
    assert re.search(r"^cut +xxs24 +data/digits +1/3 +val/acc1 40\.50 .* stopped", told.out, re.M)
    main(["runs", "--json"])
    assert json.loads(capsys.readouterr().out)[1]["state"] == "stopped"


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path)])
    assert capsys.readouterr().err == f"cait: error: cannot use {tmp_path}: Permission denied\n"

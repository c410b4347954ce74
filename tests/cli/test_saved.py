"""The config.yaml of a run goes on to be read: settings of extras that are gone are left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, Cait, checkpoint, rows

from cait.cli import main

AVERAGED = ["--trainer.callbacks+=cait.train.ema.EMA", "--trainer.callbacks.decay=0.5"]
CONFIG = "logs/run/config.yaml"


@pytest.fixture
def run(cait: Cait, tmp_path: Path) -> Path:
    """A run of two steps, whose moving average is a callback by its class path."""
    done = cait("fit", *SMALL, *AVERAGED, "--run_name=run", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1")
    assert done.returncode == 0, done.stderr
    return tmp_path / "logs/run"


def edit(run: Path, **changes: dict[str, Any]) -> None:
    """Write the run's config.yaml with changes, as {"trainer": {"profiler": ...}}."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        config[name] = config.get(name, {}) | value
    path.write_text(yaml.safe_dump(config))


def average(run: Path) -> torch.Tensor:
    """The head's averaged weights in a run's checkpoint."""
    return checkpoint(run)["callbacks"]["EMA"]["head.weight"]


def test_what_an_absent_extra_took_is_left_out_in_one_line(run: Path, cait: Cait) -> None:
    callbacks = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["callbacks"]
    gone = {"class_path": "cait.extras.gone.callback.Gone", "init_args": {"every": 2}}
    edit(
        run,
        gone={"every_n_steps": 5},
        data={"gone": 3},
        model={"gone": False},
        trainer={"callbacks": [gone, *callbacks]},
    )
    before = average(run)
    resumed = cait("resume", "run", "--trainer.max_steps=4")
    assert resumed.returncode == 0, resumed.stderr
    lines = [line for line in (resumed.stdout + resumed.stderr).splitlines() if "left out" in line]
    reason = "because no extra that is here takes them"
    assert lines == [f"{CONFIG}: left out data.gone, gone.every_n_steps, trainer.callbacks, {reason}"]
    assert [row["step"] for row in rows(run) if row["train/loss"]] == ["0", "1", "2", "3"]
    assert not torch.equal(average(run), before)  # the other callback stays
    assert "gone" not in (run / "config.yaml").read_text()
    edit(run, model={"gone": 4})  # it may be one of a module of the user's own, and without it the run would be another
    refused = cait("resume", "run", "--trainer.max_steps=5")
    assert refused.returncode == 2
    assert "model.gone" in refused.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {bach_size: 32}", "bach_size; did you mean --data.batch_size?"),
        ("gone: {every_n_steps: 5}", "gone"),
        ("trainer: {callbacks: [{class_path: cait.extras.gone.callback.Gone}]}", "cait.extras.gone"),
    ],
)
def test_a_configuration_of_the_users_own_is_taken_at_its_word(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A typo there is an error, and no extra that is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["cait"])
    Path("mine.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, "--config=mine.yaml", "--print_config"])
    told = capfd.readouterr().err
    assert stop.value.code == 2
    assert re.fullmatch(rf"cait: error: .*{re.escape(message)}.*\n", told), told

"""The config.yaml of a run goes on to be read: settings of extras that are gone are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from harness import SMALL, Cait, rows

CONFIG = "logs/run/config.yaml"


def test_what_an_absent_extra_took_is_left_out_in_one_line(cait: Cait, tmp_path: Path) -> None:
    def edit(**changes: dict[str, Any]) -> None:
        config = yaml.safe_load(path.read_text())
        for name, value in changes.items():
            config[name] = config.get(name, {}) | value
        path.write_text(yaml.safe_dump(config))

    done = cait("fit", *SMALL, "--run_name=run", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1")
    assert done.returncode == 0, done.stderr
    path = tmp_path / CONFIG
    edit(gone={"every_n_steps": 5}, data={"gone": 3}, model={"gone": False})
    resumed = cait("resume", "run", "--trainer.max_steps=4", "--trust-config")
    assert resumed.returncode == 0, resumed.stderr
    lines = [line for line in (resumed.stdout + resumed.stderr).splitlines() if "left out" in line]
    reason = "because no extra that is here takes them"
    assert [sorted(line.split(": left out ")[1].removesuffix(f", {reason}").split(", ")) for line in lines] == [
        ["data.gone", "gone.every_n_steps"]
    ]
    assert [row["step"] for row in rows(tmp_path / "logs/run") if row["train/loss"]] == ["0", "1", "2", "3"]
    assert "gone" not in path.read_text()
    edit(model={"gone": 4})  # it may be one of a module of the user's own, and without it the run would be another
    refused = cait("resume", "run", "--trainer.max_steps=5", "--trust-config")
    assert refused.returncode == 2
    assert "model.gone" in refused.stderr

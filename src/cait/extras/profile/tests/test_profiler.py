"""The table of operators and the trace in the folder of a run, asked for by a class path of today or of earlier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import REPO, SMALL, Cait

OVERLAY = REPO / "configs/trainer/profile.yaml"
TODAY, EARLIER = "cait.extras.profile.profiler.StepProfiler", "cait.callbacks.profiler.StepProfiler"


@pytest.mark.parametrize("path", [TODAY, EARLIER])
def test_a_run_gets_a_table_and_a_trace(path: str, cait: Cait, tmp_path: Path) -> None:
    overlay = yaml.safe_load(OVERLAY.read_text())
    profiler = overlay["trainer"]["profiler"]
    assert profiler["class_path"] == TODAY
    if path == TODAY:
        profiler["init_args"] |= {"steps": 2}
        (tmp_path / "profile.yaml").write_text(yaml.safe_dump(overlay | {"run_name": "run"}))
        done = cait("fit", *SMALL, "--config=profile.yaml", "--trainer.max_steps=6", "--data.num_workers=0")
    else:  # as the saved configuration of a run has it
        pytest.importorskip("cait.extras.earlier")
        assert cait("fit", *SMALL, "--run_name=run", "--trainer.max_steps=1").returncode == 0
        config = tmp_path / "logs/run/config.yaml"
        saved = yaml.safe_load(config.read_text())
        saved["trainer"]["profiler"] = {"class_path": EARLIER, "init_args": {"steps": 2, "row_limit": 50}}
        config.write_text(yaml.safe_dump(saved))
        done = cait("resume", "run", "--trainer.max_steps=8", "--data.num_workers=0", "--trust-config")  # it was edited
        assert TODAY in config.read_text()
        assert EARLIER not in config.read_text()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs/run"
    assert "aten::" in (folder / "fit-profile.txt").read_text()  # which operators are slowest depends on the machine
    (trace,) = folder.glob("*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {f"ProfilerStep#{step}" for step in (3, 4)} <= {event["name"] for event in events}

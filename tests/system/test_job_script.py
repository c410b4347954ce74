"""scripts/slurm.sbatch, beside stand-ins for srun, scontrol and cait."""

import os
import subprocess

import pytest
from harness import REPO, beside, over_table

PARTS = beside(__file__)


@pytest.fixture
def place(tmp_path):
    for name, code in PARTS["programs"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)
    return tmp_path


def submit(place, *words, **variables):
    """The script's status, and the calls of srun and scontrol."""
    calls = place / "calls"
    calls.write_text("")
    path = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    script = ["bash", REPO / "scripts/slurm.sbatch", *words]
    env = os.environ | PARTS["variables"] | path | variables
    done = subprocess.run(script, cwd=place, env=env, capture_output=True)
    return done.returncode, calls.read_text().splitlines()


def test_it_needs_the_name_of_a_run(place):
    assert submit(place) == (2, [])


@over_table(__file__, "jobs")
def test_a_job(starts, place):
    for start in starts:
        ends = {"STATUS": str(start["status"]), "SAYS": start.get("says", "")}
        status, calls = submit(place, *start["words"], **ends, **start.get("variables", {}))
        assert status == start.get("exits", start["status"])
        if "called" in start:
            words = start["called"].format(nodes=PARTS["nodes"])
            assert calls[0] == f"srun --wait=120 .venv/bin/cait {words}"
        assert calls[1:] == ["scontrol requeue 7"] * start["requeued"]
    if not start["requeued"]:
        assert [*place.glob("slurm-*")] == []

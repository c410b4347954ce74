"""The cores of a training process, as launchers, schedulers and containers leave them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from cait import cores
from cait.cli import main


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups without a limit."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUP", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize(
    ("affinity", "of_step", "limit", "processes", "expected"),
    [
        pytest.param(96, None, None, 8, 12, id="eight processes that Lightning or torchrun starts"),
        pytest.param(96, None, None, 1, 96, id="one process"),
        pytest.param(12, "96", None, 8, 12, id="SLURM, each bound to its cores"),
        pytest.param(96, "96", None, 8, 12, id="SLURM, none bound"),
        pytest.param(128, "64", None, 8, 8, id="SLURM, none bound nor confined to the step"),
        pytest.param(96, None, "800000 100000", 2, 4, id="a container with a quota"),
        pytest.param(4, None, "800000 100000", 2, 2, id="a quota above the cores"),
        pytest.param(96, None, "50000 100000", 1, 1, id="a quota of a half"),
        pytest.param(96, None, "max 100000", 8, 12, id="no quota"),
        pytest.param(2, None, None, 8, 1, id="fewer cores than processes"),
        pytest.param(12, "12(x2)", None, 2, 6, id="what is no number"),
    ],
)
def test_the_share_of_a_process(
    affinity: int,
    of_step: str | None,
    limit: str | None,
    processes: int,
    expected: int,
    groups: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    if of_step is not None:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", of_step)
    if limit is not None:
        (groups / "own").write_text("0::/\n")
        (groups / "cpu.max").write_text(f"{limit}\n")
    assert cores.share(processes) == expected


def test_the_least_quota_around_a_process_counts(groups: Path) -> None:
    assert cores.quota() == math.inf
    (groups / "own").write_text("0::/job.slice/job-1.scope/step\n")
    step = groups / "job.slice/job-1.scope/step"
    step.mkdir(parents=True)
    for folder, limit, expected in (
        (step, "max 100000", math.inf),
        (step.parent, "400000 50000", 8),
        (groups / "job.slice", "1200000 100000", 8),
        (step, "300000 100000", 3),
    ):
        (folder / "cpu.max").write_text(limit + "\n")
        assert cores.quota() == expected


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_gpus_memory_grows_in_segments_unless_the_user_says_how(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("", "CUDA_", "HIP_"):
        monkeypatch.setenv(f"PYTORCH_{kind}ALLOC_CONF", "")  # so that it is taken away again
        monkeypatch.delenv(f"PYTORCH_{kind}ALLOC_CONF")
    if given:
        monkeypatch.setenv(given, "backend:native")
    main(["--version"])
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == ({given: "backend:native"} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

"""Runs that a program starts: stopped together, resumed when there is a checkpoint, and why they failed."""

from __future__ import annotations

import signal
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from cait.extras.runner import OUTPUT, Runner, failure
from cait.run.program import Program


def other(folder: Path, code: str) -> Program:
    """A program that runs Python code in the place of `cait`."""
    script = folder / "other.py"
    script.write_text(code)
    return Program(script=str(script))


def test_a_run_with_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    runner = Runner(other(tmp_path, "import os, sys; print(*sys.argv[1:], os.environ['EXTRA']); sys.exit(3)"))
    assert runner.run(folder, ["--model.lr=1"], {"EXTRA": "here"}) == 3
    place = f"--trainer.default_root_dir={tmp_path} --run_name=mine"
    assert failure(folder, 3) == f"fit --model.lr=1 {place} here"
    (folder / "checkpoints/last.ckpt").touch()
    runner.run(folder, ["--model.lr=1"], {"EXTRA": ""})
    assert (folder / OUTPUT).read_text().splitlines()[1:] == [f"resume {folder} "]


def test_a_run_is_stopped_once_it_is_enough(tmp_path: Path) -> None:
    runner = Runner(other(tmp_path, "import time; print('here', flush=True); time.sleep(600)"))
    started = (tmp_path / OUTPUT).exists
    assert runner.run(tmp_path, [], {}, lambda: started() and bool((tmp_path / OUTPUT).read_text())) == -signal.SIGTERM


def test_an_error_beside_runs_ends_them(tmp_path: Path) -> None:
    runner, statuses = Runner(other(tmp_path, "import time; time.sleep(600)")), []

    def fails() -> None:
        raise ValueError("the disk is full")

    def both() -> None:
        with runner.threads(2) as pool:
            jobs = [pool.submit(lambda: statuses.append(runner.run(tmp_path, [], {}))), pool.submit(fails)]
            for job in as_completed(jobs):
                job.result()

    with pytest.raises(ValueError, match="the disk is full"):
        both()
    assert statuses == [-signal.SIGTERM]
    assert runner.run(tmp_path, [], {}) == -signal.SIGTERM  # no more are started


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_terminal_stops_as_ctrl_c_does(signum: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), Runner(Program(), "trials").threads(1):
            signal.raise_signal(signum)
        assert signal.getsignal(signum) == signal.SIG_DFL
    finally:
        signal.signal(signum, before)
    assert "The trials have saved; the same command continues them" in capsys.readouterr().err

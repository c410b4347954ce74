"""Locks on files, and the lease in their place on a file system without `flock`."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import KIND, environment

from cait import file_lock
from cait.errors import UserError
from cait.file_lock import Lock
from cait.guards.run_lock import RunLock

HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
code = int(sys.argv[1])
def flock(*_):
    raise OSError(code, "no locks here")
if code:
    fcntl.flock = flock
from cait import file_lock
from cait.guards.run_lock import RunLock
file_lock.LEASE, file_lock.RENEWAL = 1.0, 0.2
place = Path(sys.argv[2])
held = RunLock(place) if sys.argv[3] == "run" else file_lock.file_lock(place)
if sys.argv[3] == "file":
    held.__enter__()
print("held", flush=True)
time.sleep(3600)
"""


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What flock answers, as on Lustre without it; leases are short."""

    def flock(*_: Any) -> None:
        raise OSError(request.param, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(file_lock, "LEASE", 1.0)
    monkeypatch.setattr(file_lock, "RENEWAL", 0.2)
    return request.param


@contextmanager
def held(code: int, place: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a run's folder, or a file's lock."""
    folder = place.parent
    folder.mkdir(exist_ok=True)
    (folder / "hold.py").write_text(HOLD)
    command = [sys.executable, "hold.py", str(code), str(place), kind]
    job = KIND(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        yield job
    finally:
        job.kill()
        job.wait()


def move_elsewhere(lease: Path) -> None:
    """Have another machine hold the lease, whose processes nobody here can ask for."""
    text = lease.read_text()
    assert socket.gethostname() in text
    lease.write_text(text.replace(socket.gethostname(), "node-7"))


def test_a_folder_without_locks_is_held_by_a_lease(tmp_path: Path, code: int) -> None:
    run = tmp_path / "run"
    with held(code, run, "run") as job:
        time.sleep(1.5)  # longer than the lease, which is renewed
        with pytest.raises(UserError, match=rf"is being trained by process {job.pid} on .*, which renews .*\.lease"):
            RunLock(run)
        job.kill()
        job.wait()
        start = time.monotonic()
        RunLock(run).roll_back()  # its process is not there any more, so nobody need wait
        assert time.monotonic() - start < 0.9


def test_a_run_goes_on_on_another_machine_than_the_one_that_was_lost(tmp_path: Path, code: int) -> None:
    run = tmp_path / "run"
    with held(code, run, "run") as job:
        job.kill()
        job.wait()
        move_elsewhere(run / ".lock.lease")
        lock = RunLock(run)
        assert "process" in (run / ".owner").read_text()
        lock.release()
    assert not (run / ".lock.lease").exists()


def test_a_process_that_was_held_up_does_not_go_on_in_a_folder_that_another_has_taken(
    tmp_path: Path, code: int
) -> None:
    run = tmp_path / "run"
    lock = RunLock(run)
    lock.on_train_batch_start()
    (run / ".lock.lease").unlink()
    with held(code, run, "run"):
        time.sleep(1)
        with pytest.raises(UserError, match=r"run was taken over by process \d+ on"):
            lock.on_train_batch_start()


@pytest.mark.parametrize("code", [0, errno.ENOSYS], indirect=["code"])
def test_one_process_at_a_time(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not code:
        monkeypatch.undo()
    place = tmp_path / "some/.lock"
    with held(code, place, "file") as job:
        with pytest.raises(file_lock.Timeout):
            Lock(place).acquire(0.3)
        job.kill()
        job.wait()
        with file_lock.file_lock(place):
            pass


@pytest.mark.parametrize("code", [0, errno.ENOSYS], indirect=["code"])
def test_who_waits_says_for_what_and_not_for_ever(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not code:
        monkeypatch.undo()
    monkeypatch.setattr(file_lock, "QUIET", 0.1)
    monkeypatch.setattr(file_lock, "PATIENCE", 0.5)
    place = tmp_path / ".lock"
    with held(code, place, "file") as job:
        for _ in range(2):
            with (
                pytest.raises(UserError, match=rf"lock(\.lease)? has been held for .* by process {job.pid} on"),
                file_lock.file_lock(place),
            ):
                pass
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count(f"waiting for {place}{'.lease' if code else ''}, which process {job.pid} on ") == 1


def test_a_lease_ends_with_a_signal_too(tmp_path: Path, code: int) -> None:
    place = tmp_path / ".lock"
    with held(code, place, "file") as job:
        os.kill(job.pid, signal.SIGTERM)
        job.wait()
        lock = Lock(place)
        lock.acquire(0.5)
        lock.release()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_no_file_can_be_made_nobody_waits() -> None:
    told = r"cannot lock /proc/\.a\.lock, so nothing can be put into /proc"
    with pytest.raises(UserError, match=told), file_lock.file_lock(Path("/proc/.a.lock")):
        pass

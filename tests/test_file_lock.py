"""Locks on files."""

from __future__ import annotations

import errno
import fcntl
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cait import file_lock
from cait.errors import UserError
from cait.extras.runs.verb import is_held
from cait.guards.run_lock import RunLock


def test_one_process_at_a_time_and_who_waits_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "some/.lock"
    monkeypatch.setattr(file_lock, "QUIET", 0.1)
    place.parent.mkdir()
    held = file_lock.acquire(place, 0)
    with pytest.raises(file_lock.Timeout):
        file_lock.acquire(place, 0.1)
    tell = file_lock.tell

    def tell_and_let_go(line: str) -> None:
        tell(line)
        held.release()

    monkeypatch.setattr(file_lock, "tell", tell_and_let_go)
    with file_lock.file_lock(place), pytest.raises(file_lock.Timeout):
        FileLock(place).acquire(timeout=0)
    assert capsys.readouterr().err == f"waiting for {place}, which another process holds\n"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_used_and_named(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(tmp_path / "run")
    assert not is_held(tmp_path / "run")
    lock.release()
    with file_lock.file_lock(tmp_path / ".lock"):
        pass
    assert capsys.readouterr().err.count("no locks on the file system of ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_no_file_can_be_made_nobody_waits() -> None:
    told = r"cannot lock /proc/\.a\.lock, so nothing can be put into /proc"
    with pytest.raises(UserError, match=told), file_lock.file_lock(Path("/proc/.a.lock")):
        pass

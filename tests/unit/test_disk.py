"""Files that are whole after a kill, and locks. What is read and refused is in golden/files.yaml and run.yaml."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock
from harness import over_table

from cait import disk
from cait.errors import UserError
from cait.guards.run_lock import RunLock


@over_table(__file__, "kills")
def test_a_kill_leaves_a_whole_file(moves, texts, tmp_path, monkeypatch):
    """The one before, the new one, or while they change places the one before under the name for it."""
    path, previous = tmp_path / "last", tmp_path / "previous"
    path.write_text("old")
    previous.write_text("older")
    replace = os.replace
    done = []

    def killed(source, target):
        if len(done) == moves:
            raise SystemExit
        replace(source, target)
        done.append(target)

    monkeypatch.setattr(os, "replace", killed)
    with suppress(SystemExit), disk.atomic_write(path, previous) as beside:
        beside.write_text("new")
    assert [file.read_text() if file.exists() else None for file in (path, previous)] == texts


def test_an_error_names_the_file_that_the_user_knows(tmp_path):
    path = tmp_path / "none/it"
    with pytest.raises(FileNotFoundError) as failed, disk.atomic_write(path) as beside:
        beside.touch()
    assert failed.value.filename == str(path)


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    disk.check_output(tmp_path / "new/file")
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_has_half_written_goes_before_the_next_writes(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    stays = {
        tmp_path / f".a*.csv.{os.getpid()}.tmp",
        tmp_path / f".b.csv.{ended.pid}.tmp",
        tmp_path / ".a*.csv.99999999999999999999.tmp",
    }
    for path in (tmp_path / f".a*.csv.{ended.pid}.tmp", *stays):
        path.touch()
    disk.check_output(tmp_path / "a*.csv", is_new=True)
    assert {*tmp_path.iterdir()} == stays


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    with disk.file_lock(tmp_path / "some/.lock"), pytest.raises(TimeoutError):
        FileLock(tmp_path / "some/.lock").acquire(timeout=0)


def test_who_waits_for_a_lock_says_so(tmp_path, monkeypatch, capsys):
    path = tmp_path / ".lock"
    lock = disk.acquire_lock(path, 0)
    tell = disk.tell

    def tell_and_let_go(line):
        tell(line)
        lock.release()

    monkeypatch.setattr(disk, "QUIET", 0.1)
    monkeypatch.setattr(disk, "tell", tell_and_let_go)
    with disk.file_lock(path):
        pass
    assert capsys.readouterr().err == f"waiting for {path}, which another process holds\n"


@pytest.mark.parametrize(
    "code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get
)
def test_a_file_system_without_locks_is_used_and_named(code, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock(tmp_path / "run").release()
    with disk.file_lock(tmp_path / ".lock"):
        pass
    assert capsys.readouterr().err.count("no locks on the file system of ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_no_file_can_be_made_nobody_waits():
    path = Path("/proc/.a.lock")
    with pytest.raises(UserError, match=r"cannot lock /proc/\.a\.lock"), disk.file_lock(path):
        pass

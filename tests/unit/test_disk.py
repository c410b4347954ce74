"""Files that are whole after a kill, locks, and tables of images as people save them. Refusals: golden/run.yaml."""

import errno
import fcntl
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from cait import disk
from cait.errors import UserError
from cait.guards.run_lock import RunLock


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "\ufefflabel, Path\nx,0.jpg\n\ny,\udcff.jpg\n",
            [(2, {"label": "x", "path": "0.jpg"}), (4, {"label": "y", "path": "\udcff.jpg"})],
        ),
        ('path, label\n0.jpg, "x, y"\n', [(2, {"path": "0.jpg", "label": "x, y"})]),
    ],
)
def test_a_table_of_a_spreadsheet_is_read(text, rows, tmp_path):
    path = tmp_path / "it.csv"
    path.write_text(text, "utf-8", "surrogateescape")
    assert list(disk.read_csv(path, "it")) == rows


@pytest.mark.parametrize("more", [{}, {"on": True, "more": 0.5}, {"on": None}])
def test_json_of_the_right_shape_is_read(more, tmp_path):
    content = {"name": "a", "sizes": [1]} | more
    path = tmp_path / "it.json"
    path.write_text(json.dumps(content))
    shape = {"name": str, "sizes": [int], "on?": bool, ...: (int, float)}
    assert disk.read_json(path, shape) == content
    assert disk.read_text(path, limit=path.stat().st_size)


@pytest.mark.parametrize(
    ("moves", "texts"),
    [(0, ["old", "older"]), (1, [None, "old"]), (2, ["new", "old"])],
)
def test_a_kill_leaves_a_whole_file(moves, texts, tmp_path, monkeypatch):
    """The one before, the new one, or while they change places the one before under the name for it."""
    path, previous = tmp_path / "last", tmp_path / "previous"
    path.write_text("old")
    previous.write_text("older")
    replace = os.replace
    done: list[Path] = []

    def killed(source, target):
        if len(done) == moves:
            raise SystemExit
        replace(source, target)
        done.append(target)

    monkeypatch.setattr(os, "replace", killed)
    try:
        with disk.atomic_write(path, previous) as beside:
            beside.write_text("new")
    except SystemExit:
        pass
    assert [file.read_text() if file.exists() else None for file in (path, previous)] == texts


def test_an_error_names_the_file_that_the_user_knows(tmp_path):
    path = tmp_path / "none/it"
    with pytest.raises(FileNotFoundError) as failed, disk.atomic_write(path) as beside:
        beside.touch()
    assert failed.value.filename == str(path)


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/proc/none/x")):
        with pytest.raises(UserError, match=str(path)):
            disk.check_output(path)
    disk.check_output(tmp_path / "new/file")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


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


def random_value(draw, level):
    """Lists, tuples, sets and dictionaries that hold each other."""
    if level == 0 or draw.random() < 0.2:
        return draw.choice([None, True, -3, 0.5, "text", "", math.inf])
    items = [random_value(draw, level - 1) for _ in range(draw.randrange(5))]
    container = draw.choice([list, tuple, dict, set])
    if container is dict:
        return dict(enumerate(items))
    if container is set:
        items = [item for item in items if isinstance(item, str | int | float | None)]
    return container(items)


def as_plain(value):
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [as_plain(item) for item in value]
    return value


def test_what_a_file_holds_is_made_anew_of_plain_values():
    draw = random.Random(0)
    for _ in range(300):
        value = random_value(draw, 6)
        plain = disk.plain(value, "it")
        assert repr(plain) == repr(as_plain(value))  # which tells True from 1


def test_what_stands_in_two_places_is_copied_in_each():
    twice = disk.plain([[1]] * 2, "it")
    twice[0].append(2)
    assert twice == [[1, 2], [1]]

"""Files that are whole after a kill, locks, and tables of images as people save them."""

import errno
import fcntl
import json
import math
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cait import disk
from cait.errors import UserError
from cait.guards.run_lock import RunLock


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,label\na.png,b\n", "it has no column `path`, it has file, label"),
        ('path,label\na.png,x\nb.png,"x\nc.png,y\n', "is no CSV file: unexpected end of data"),
        (
            "path,label\na.png,x\nb.png,terrier, brown\n",
            "line 3: more cells than the header has; put quotes around",
        ),
        (
            "path,label\nb.png,Käse\n".encode("cp1252"),
            "line 2: the label K\N{REPLACEMENT CHARACTER}se is not UTF-8",
        ),
    ],
)
def test_a_wrong_table_is_told_in_a_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words):
        list(disk.read_csv(tmp_path / "it.csv", "it"))


def test_a_table_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_text(
        "label, Path\nx,0.jpg\n\ny,\udcff.jpg\n", "utf-8-sig", "surrogateescape"
    )
    rows = list(disk.read_csv(tmp_path / "it.csv", "it"))
    assert rows == [(2, {"label": "x", "path": "0.jpg"}), (4, {"label": "y", "path": "\udcff.jpg"})]
    (tmp_path / "it.csv").write_text('path, label\n0.jpg, "x, y"\n')
    assert [*disk.read_csv(tmp_path / "it.csv", "it")] == [(2, {"path": "0.jpg", "label": "x, y"})]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"on": True, "more": 0.5}, None),
        ({"on": None}, None),
        ({"name": None}, "name cannot be used: it is missing"),
        ({"sizes": [1, True]}, r"sizes\[1\] cannot be used: it is True"),
        ({"on": 1}, "on cannot be used: it is 1"),
        ({"more": "x"}, "more cannot be used: it is 'x'"),
    ],
)
def test_json_of_another_shape_is_refused_by_its_field(
    change: dict, words: str | None, tmp_path: Path
) -> None:
    content = {"name": "a", "sizes": [1]} | change
    (path := tmp_path / "it.json").write_text(json.dumps(content))
    shape = {"name": str, "sizes": [int], "on?": bool, ...: (int, float)}
    with pytest.raises(UserError, match=words) if words else nullcontext():
        assert disk.read_json(path, shape) == content
    assert disk.read_text(path, limit=path.stat().st_size)
    path.write_text(json.dumps("é", ensure_ascii=False), encoding="utf-16")
    with pytest.raises(UserError, match=r"it\.json is no text in UTF-8.* save it as UTF-8"):
        disk.read_text(path)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_kill_leaves_a_whole_file(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before, the new one, or while they change places the one before under the name for it."""
    path, previous = tmp_path / "last", tmp_path / "previous"
    path.write_text("old")
    previous.write_text("older")
    move, left = os.replace, [None] * calls

    def killed(*paths: Path) -> None:
        if not left:
            raise SystemExit
        left.pop()
        move(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with (
        pytest.raises(SystemExit) if calls < 2 else nullcontext(),
        disk.atomic_write(path, previous) as beside,
    ):
        beside.write_text("new")
    found = [each.read_text() if each.exists() else None for each in (path, previous)]
    assert found == [["old", "older"], [None, "old"], ["new", "old"]][calls]


def test_an_error_names_the_file_that_the_user_knows(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError) as failed,
        disk.atomic_write(tmp_path / "none/it") as beside,
    ):
        beside.touch()
    assert failed.value.filename == str(tmp_path / "none/it")


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for place in (tmp_path / "pipe", tmp_path / "file/x", tmp_path, Path("/proc/none/x")):
        with pytest.raises(UserError, match=str(place)):
            disk.check_output(place)
    disk.check_output(tmp_path / "new/file")
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_process_has_half_written_goes_before_the_next_writes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone, ours = (tmp_path / f".a*.csv.{pid}.tmp" for pid in (ended.pid, os.getpid()))
    others = [tmp_path / f".b.csv.{ended.pid}.tmp", tmp_path / ".a*.csv.99999999999999999999.tmp"]
    for path in (gone, ours, *others):
        path.touch()
    disk.check_output(tmp_path / "a*.csv", is_new=True)
    assert sorted(tmp_path.iterdir()) == sorted([ours, *others])


def test_one_process_at_a_time_and_who_waits_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "some/.lock"
    monkeypatch.setattr(disk, "QUIET", 0.1)
    place.parent.mkdir()
    held = disk.acquire_lock(place, 0)
    with pytest.raises(TimeoutError):
        disk.acquire_lock(place, 0.1)
    tell = disk.tell

    def tell_and_let_go(line: str) -> None:
        tell(line)
        held.release()

    monkeypatch.setattr(disk, "tell", tell_and_let_go)
    with disk.file_lock(place), pytest.raises(TimeoutError):
        FileLock(place).acquire(timeout=0)
    assert capsys.readouterr().err == f"waiting for {place}, which another process holds\n"


@pytest.mark.parametrize(
    "code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get
)
def test_a_file_system_without_locks_is_used_and_named(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock(tmp_path / "run").release()
    with disk.file_lock(tmp_path / ".lock"):
        pass
    assert capsys.readouterr().err.count("no locks on the file system of ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_no_file_can_be_made_nobody_waits() -> None:
    told = r"cannot lock /proc/\.a\.lock, so nothing can be put into /proc"
    with pytest.raises(UserError, match=told), disk.file_lock(Path("/proc/.a.lock")):
        pass


def doubled(times: int) -> list[Any]:
    """A list that holds another twice, and that one another twice: 40 of them stand for 2^40 values."""
    value: list[Any] = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


def within(times: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(times):
        value = [value]
    return value


LOOP: list[Any] = []
LOOP.append({"itself": LOOP})
REFUSED = {
    "holds itself": LOOP,
    "stands for much": doubled(40),
    "is deep": within(100_000),
    "is long": ["x" * (1 << 20)] * 100,
    "a number without end": 10**30_000,
    "such a key": {10**30_000: 1},
    "a key of parts": {("a", "b"): 1},
    "bytes": b"x",
    "an object": Path("x"),
    "a class": int,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_is_not_plain_is_refused_in_a_line_that_names_it(value: Any) -> None:
    for content, words in ((value, "it: "), ({"a": [0, value]}, r"it: a[\w.]*")):
        with pytest.raises(UserError, match=words) as caught:
            disk.plain(content, "it")
        assert len(str(caught.value)) < 2_000
    with pytest.raises(UserError, match="cannot be used"):
        # states of any type may not hold each other either
        disk.plain({"a": LOOP}, "it", kept=(object,))


def test_what_a_file_holds_is_made_anew_of_plain_values() -> None:
    """Whatever lists, tuples, sets and dictionaries hold each other: a tree of lists and dictionaries."""
    draw = random.Random(0)

    def value(level: int) -> Any:
        if level == 0 or draw.random() < 0.2:
            return draw.choice([None, True, -3, 0.5, "text", "", math.inf])
        parts = [value(level - 1) for _ in range(draw.randrange(5))]
        kind = draw.choice([list, tuple, dict, set])
        if kind is set:
            return {each for each in parts if isinstance(each, str | int | float | None)}
        return dict(enumerate(parts)) if kind is dict else kind(parts)

    def same(ours: Any, theirs: Any) -> bool:
        if isinstance(theirs, dict):
            return (
                type(ours) is dict
                and [*ours] == [*theirs]
                and all(same(ours[key], theirs[key]) for key in theirs)
            )
        if isinstance(theirs, list | tuple | set):
            return type(ours) is list and len(ours) == len(theirs) and all(map(same, ours, theirs))
        return type(ours) is type(theirs) and ours == theirs

    assert all(same(disk.plain(given, "it"), given) for given in (value(6) for _ in range(300)))
    twice = disk.plain([[1]] * 2, "it")
    twice[0].append(2)
    assert twice == [[1, 2], [1]]

"""Files: read as plain data, written so that a kill leaves the old one or the new one, and locked."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO

from cait.errors import UserError, one_line, printable, tell

if TYPE_CHECKING:
    from filelock import BaseFileLock

TABLE: Any = dict(newline="", encoding="utf-8", errors="surrogateescape")
"""How files with the names of images are opened: names may hold bytes that are not text."""

INSTEAD = {
    b"version https://git-lfs": "it is a pointer of Git LFS: fetch the file itself with `git lfs pull`",
    b"PK": "it is a zip archive that is cut off, or one of something else",
    b"<": "it is a page of HTML or XML: fetch the file itself",
}
"""What a download leaves in the place of a file, by how it begins."""
TEXT = 1 << 28
"""Bytes of the largest text that is read."""
MOST_VALUES, MOST_LETTERS, DEEPEST, MOST_BITS = 1 << 18, 1 << 26, 50, 63
"""The most that a file may hold: values, letters of all texts, levels, and bits of a whole number."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What `flock` answers on a file system without locks, as Lustre mounted without `flock`, or NFS 3 without lockd."""
QUIET = 20.0
"""Seconds to wait for a lock before a line says for which."""


def open_file(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file to read, without waiting: a pipe would wait for a writer, and a device may never end.

    Links are followed. Raises UserError if it is no regular file, or has more bytes than `limit`.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif limit is not None and status.st_size > limit:
        problem = f"has {status.st_size:,} bytes, more than the {limit:,} that are read"
    else:
        return file
    file.close()
    raise UserError(f"{path} {problem}")


def in_its_place(path: str | Path) -> str:
    """The end of a message: what lies at a path instead of the file that was meant; empty if that is not known."""
    with suppress(OSError, UserError), open_file(path) as file:
        head = file.read(64).lstrip()
        what = next((told for start, told in INSTEAD.items() if head.startswith(start)), "" if head else "it is empty")
        return what and f"; {what}"
    return ""


def read_text(path: Path, limit: int = TEXT) -> str:
    """The text of a file. Raises what `open_file` does, and UserError if it is no UTF-8."""
    with open_file(path, limit) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is no text in UTF-8: if it is text, save it as UTF-8") from error


def read_json(path: Path, shape: Any) -> Any:
    """The value in a file. Raises what `read_text` does, and UserError if it is no JSON of this `check_shape`."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {one_line(error)}") from error
    content = plain(content, path)
    check_shape(content, shape, path)
    return content


def plain(value: Any, source: Path | str, name: str = "", kept: tuple[type, ...] = ()) -> Any:
    """What a file holds, made anew of None, bool, int, float, str, lists and dicts: it may be made to do harm.

    Every reader of a file calls it, before anything looks at what was read. Tuples and sets become lists, and objects
    of the types in `kept` stay. A part that stands in several places is counted and made in each, so a file that is
    small may not stand for much, and nothing holds itself. Raises UserError if it holds something else, or more than a
    file may hold; the error names the file `source`, and the field below `name`.
    """
    values = letters = 0

    def made(part: Any, name: str, level: int) -> Any:
        nonlocal values, letters
        is_dict, is_list = isinstance(part, dict), isinstance(part, list | tuple | set | frozenset)
        pairs, leaves = [], [part]
        if is_dict:
            pairs, leaves = [*part.items()], [*part]
        elif is_list:
            pairs, leaves = [*enumerate(part)], []
        values, letters = values + len(pairs), letters + sum(len(leaf) for leaf in leaves if isinstance(leaf, str))
        problems = (_problem(leaf) for leaf in leaves if is_dict or not isinstance(leaf, kept))
        problem = next(filter(None, problems), "")
        if values > MOST_VALUES or letters > MOST_LETTERS or (pairs and level == DEEPEST):
            most = f"{MOST_VALUES:,} values, {MOST_LETTERS:,} letters or {DEEPEST} levels"
            problem = f"too large: a file may hold {most}"
        if problem:
            raise UserError(f"{source}: {name or 'its content'} cannot be used: it is {problem}")
        found = {key: made(each, f"{name}.{key!s:.40}".lstrip("."), level + 1) for key, each in pairs}
        return found if is_dict else [*found.values()] if is_list else part

    return made(value, name, 0)


def _problem(value: Any) -> str:
    """What a value is that cannot be used, as a part that has no parts or as a key; empty if it can."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a whole number of more than {MOST_BITS} bits"
    is_plain = value is None or isinstance(value, str | int | float)
    return "" if is_plain else f"neither text nor a number, but of the type {type(value).__name__}"


def check_shape(value: Any, shape: Any, path: Path, name: str = "") -> None:
    """Refuse a `plain` value that a crash or somebody else may have written: a UserError names the file and the field.

    A shape is a type or several; [shape] of a list's items; {"field": shape}, where "field?" may be missing or None,
    and {...: shape} of all other fields.
    """
    kind: Any = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = "missing" if value is None else f"{one_line(repr(value))[:40]}"
        raise UserError(f"{path}: {name or 'its content'} cannot be used: it is {found}")
    if isinstance(shape, list):
        for place, item in enumerate(value):
            check_shape(item, shape[0], path, f"{name}[{place}]")
    if isinstance(shape, dict):
        fields = {field.rstrip("?"): field for field in shape if field is not ...}
        for key, field in fields.items():
            if value.get(key) is not None or not field.endswith("?"):
                check_shape(value.get(key), shape[field], path, f"{name}.{key}".lstrip("."))
        for key in value.keys() - fields.keys() if ... in shape else ():
            check_shape(value[key], shape[...], path, f"{name}.{key}".lstrip("."))


def check_inside(folder: Path) -> None:
    """Refuse a run's folder with a link out of it, or with a pipe or a device, whatever its name.

    What is written to it would land elsewhere, and what is read be copied. W&B's own folder is left out: it links to
    the user's cache, and nothing else reads or writes there.
    """
    home = folder.resolve()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "wandb" or Path(place, name).is_symlink()]
        for path in (Path(place, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # a run that trains replaces its files
                mode = path.lstat().st_mode
                if S_ISLNK(mode) and not Path(os.path.realpath(path)).is_relative_to(home):
                    remedy = "this account might write there; put what it leads to in its place"
                    raise UserError(f"{path} is a link out of the run's folder: {remedy}")
                if not (S_ISLNK(mode) or S_ISREG(mode) or S_ISDIR(mode)):
                    raise UserError(f"{path} is not a regular file: take it out of the run's folder")


def check_output(path: Path, folder: bool = False, is_new: bool = False) -> None:
    """Try to write where a verb will write when its work is done: a file, maybe a new one, or files in a `folder`."""
    if is_new and path.exists():
        raise UserError(f"{path} exists; move it away or name another file with --output")
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise UserError(f"{path} is no {'folder' if folder else 'regular file'}; name one with --output")
    place = path if folder else path.parent
    try:
        folders = (place, *place.absolute().parents)
        with TemporaryFile(dir=next(each for each in folders if each.exists())):
            pass
    except OSError as error:
        raise UserError(f"cannot use {path}: {error.strerror or one_line(error)}; it cannot be written") from error


def scratch(path: Path) -> Path:
    """Where this process writes a file before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """A file to write, which is flushed and takes the place of `path`; what was there takes that of `previous`.

    After any kill one of the files is whole.
    """
    beside = scratch(path)
    try:
        yield beside
        flush(beside)
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(beside, path)
        flush(path.parent)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(beside)):
            error.filename = str(path)  # the name that the user knows
        raise


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table whole."""
    with atomic_write(path) as beside, beside.open("w", **TABLE) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_json(path: Path, content: Any) -> None:
    """Write a value whole, in one line."""
    with atomic_write(path) as beside:
        # A name that is no text is escaped, which JSON allows.
        beside.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")


def read_rows(path: Path, why: str = "there is no such file") -> list[dict[str, str]]:
    """The rows of a table that a run may be writing, without a line at the end that is not whole.

    Raises UserError if it is no table, or missing, for the reason `why`, and what `read_text` does.
    """
    try:
        head, *lines = read_text(path).removeprefix("\ufeff").split("\n")
        return list(csv.DictReader([head, *lines[:-1]] if lines else [], restval="", delimiter=_delimiter(head)))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {why}") from error
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {one_line(error)}") from error


def read_csv(path: Path, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line of each row of a table of images, and its cells by column in lower case; errors call the table `name`.

    A path may hold bytes that are no text, as names of files may; other cells may not. Semicolons and tabs part the
    cells of a header without commas.
    """
    try:
        with TextIOWrapper(open_file(path), **TABLE | {"encoding": "utf-8-sig"}) as file:  # Excel begins with a mark
            head = file.readline()
            delimiter = _delimiter(head)
            file.seek(0)
            blanks = f"{delimiter} " in head  # some tables have one before each cell, also before quotes
            reader = csv.DictReader(file, strict=True, restval="", delimiter=delimiter, skipinitialspace=blanks)
            columns = reader.fieldnames = [column.strip().lower() for column in reader.fieldnames or []]
            while columns and not columns[-1]:  # what lies below has no column
                columns.pop()
            if "path" not in columns:
                has = printable(", ".join(columns)) or "none"
                raise UserError(f"{name} has no column `path`, it has {has}; save the table as CSV in UTF-8")
            if twice := [column for column in columns if column and columns.count(column) > 1]:
                raise UserError(f"{name} has two columns `{twice[0]}`: remove one")
            for row in reader:
                _check_cells(row, f"{name}, line {reader.line_num}")
                yield reader.line_num, {column: row[column] for column in columns}
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error
    except csv.Error as error:
        raise UserError(f"{name}, after line {reader.line_num}, is no CSV file: {one_line(error)}") from error


def _delimiter(head: str) -> str:
    """What parts the cells of a table, by its first line: some spreadsheets save it with another."""
    return max(",;\t", key=lambda sign: (sign == "," and sign in head, head.count(sign)))


def _check_cells(row: dict[Any, Any], where: str) -> None:
    if any(map(str.strip, row.get(None, ()))):
        raise UserError(f"{where}: more cells than the header has; put quotes around a cell with a comma")
    for column, cell in row.items():
        if column not in ("path", None) and not is_text(cell):
            raise UserError(f"{where}: the {column} {printable(cell)} is not UTF-8; save the table as UTF-8")


def is_text(name: str) -> bool:
    """Whether a name from the disk is UTF-8."""
    return name == name.encode(errors="replace").decode()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_scratch(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for path in list(folder.rglob(".*.tmp")):
        with suppress(OSError):  # a process that has lost process 0 may still write there
            remove(path)


def acquire_lock(path: Path, seconds: float) -> BaseFileLock:
    """Lock the file `path` until the lock's `release`, or until this process ends, however it ends.

    It works between the processes of a machine, and over a shared file system that has locks. Where there are none, a
    line says so, and it is up to the user that only one process does the work. Raises filelock's Timeout if another
    process holds it for `seconds`; -1 waits for ever.
    """
    from filelock import FileLock  # it takes a tenth of a second to import

    path.open("ab").close()  # where no file can be made, filelock would wait: it takes ENOENT for a race
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        tell(f"no locks on the file system of {path.parent}: see to it that only one process works there")
    return lock


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for the lock on the file `path`, then hold it. After some seconds a line says that this process waits."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = acquire_lock(path, QUIET)
        except TimeoutError:
            tell(f"waiting for {path}, which another process holds")
            lock = acquire_lock(path, -1)
    except OSError as error:
        raise UserError(f"cannot lock {path}, so nothing can be put into {path.parent}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()

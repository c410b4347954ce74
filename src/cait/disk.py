"""Files: read as plain data, written so that a kill leaves the old one or the new one, and locked."""

from __future__ import annotations

import csv
import errno
import glob
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

from cait.errors import UserError, one_line, printable, tell, told_as
from cait.plain import TOO_MUCH as TOO_MUCH
from cait.plain import check_shape as check_shape
from cait.plain import most_bytes as most_bytes
from cait.plain import plain as plain

if TYPE_CHECKING:
    from zipfile import ZipFile

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
    try:
        with open_file(path) as file:
            head = file.read(64).lstrip()
    except (OSError, UserError):
        return ""
    if not head:
        return "; it is empty"
    for start, content in INSTEAD.items():
        if head.startswith(start):
            return f"; {content}"
    return ""


def check_packed(archive: ZipFile, path: Path | str, size: int) -> None:
    """Raise UserError if the parts of a zip archive of `size` bytes take far more; they may lie over each other."""
    if sum(entry.file_size for entry in archive.infolist()) > most_bytes(size):
        raise UserError(f"{path} cannot be used: its content {TOO_MUCH}")


def read_text(path: Path, limit: int = TEXT) -> str:
    """The text of a file. Raises what `open_file` does, and UserError if it is no UTF-8."""
    with open_file(path, limit) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is no text in UTF-8: if it is text, save it as UTF-8"
            ) from error


def read_json(path: Path, shape: Any) -> Any:
    """The value in a file. Raises what `read_text` does, and UserError if it is no JSON of this `check_shape`."""
    text = read_text(path)
    with told_as(f"{path} is no JSON"):
        content = plain(json.loads(text), path)
    check_shape(content, shape, path)
    return content


def check_inside(folder: Path) -> None:
    """Refuse a run's folder with a link out of it, or with a pipe or a device, whatever its name.

    What is written to it would land elsewhere, and what is read be copied. W&B's own folder is left out: it links to
    the user's cache, and nothing else reads or writes there.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if name != "wandb" or Path(parent, name).is_symlink()
        ]
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a run that trains replaces its files
                _check_entry(Path(parent, name), home)


def _check_entry(path: Path, home: Path) -> None:
    mode = path.lstat().st_mode
    if not S_ISLNK(mode):
        if not (S_ISREG(mode) or S_ISDIR(mode)):
            raise UserError(f"{path} is not a regular file: take it out of the run's folder")
    elif not Path(os.path.realpath(path)).is_relative_to(home):
        raise UserError(
            f"{path} is a link out of the run's folder: "
            "this account might write there; put what it leads to in its place"
        )


def check_output(path: Path, folder: bool = False, is_new: bool = False) -> None:
    """Try to write where a verb will write when its work is done: a file, maybe a new one, or files in a `folder`."""
    if is_new and path.exists():
        raise UserError(f"{path} exists; move it away or name another file with --output")
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise UserError(
            f"{path} is no {'folder' if folder else 'regular file'}; name one with --output"
        )
    try:
        parent = path.absolute() if folder else path.absolute().parent
        while not parent.exists():
            parent = parent.parent
        TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(
            f"cannot use {path}: {error.strerror or one_line(error)}; it cannot be written"
        ) from error
    if not folder:
        _clear_killed(path)


def _clear_killed(path: Path) -> None:
    """Remove what processes of this machine that were killed have half written for this file."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            os.kill(int(beside.name.split(".")[-2]), 0)
        except ProcessLookupError:
            beside.unlink(missing_ok=True)
        except (ValueError, OSError, OverflowError):
            continue


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
        beside.write_text(
            json.dumps(content, ensure_ascii=False) + "\n",
            encoding="utf-8",
            errors="backslashreplace",
        )


def read_rows(path: Path, why: str = "there is no such file") -> list[dict[str, str]]:
    """The rows of a table that a run may be writing, without a line at the end that is not whole.

    Raises UserError if it is no table, or missing, for the reason `why`, and what `read_text` does.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {why}") from error
    with told_as(f"{path} is no CSV file"):
        return list(csv.DictReader(text.split("\n")[:-1], restval="", delimiter=_delimiter(text)))


def read_csv(path: Path, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line of each row of a table of images, and its cells by column in lower case; errors call the table `name`.

    A path may hold bytes that are no text, as names of files may; other cells may not. Semicolons and tabs part the
    cells of a header without commas.
    """
    try:
        # Excel begins with a mark
        with TextIOWrapper(open_file(path), **TABLE | {"encoding": "utf-8-sig"}) as file:
            head = file.readline()
            file.seek(0)
            delimiter = _delimiter(head)
            # some tables have one before each cell, also before quotes
            blanks = f"{delimiter} " in head
            reader = csv.DictReader(
                file, strict=True, restval="", delimiter=delimiter, skipinitialspace=blanks
            )
            columns = reader.fieldnames = _columns(reader.fieldnames or (), name)
            for row in reader:
                _check_cells(row, f"{name}, line {reader.line_num}")
                yield reader.line_num, {column: row[column] for column in columns}
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error
    except csv.Error as error:
        raise UserError(
            f"{name}, after line {reader.line_num}, is no CSV file: {one_line(error)}"
        ) from error


def _columns(header: Sequence[str], name: str) -> list[str]:
    """The columns of a table of images, in lower case."""
    columns = [column.strip().lower() for column in header]
    while columns and not columns[-1]:  # what lies below has no column
        columns.pop()
    if "path" not in columns:
        known = printable(", ".join(columns)) or "none"
        raise UserError(
            f"{name} has no column `path`, it has {known}; save the table as CSV in UTF-8"
        )
    twice = [column for column in columns if column and columns.count(column) > 1]
    if twice:
        raise UserError(f"{name} has two columns `{twice[0]}`: remove one")
    return columns


def _delimiter(text: str) -> str:
    """What parts the cells of a table, by its first line: some spreadsheets save it with another."""
    head = text.partition("\n")[0]
    return "," if "," in head else max(",;\t", key=head.count)


def _check_cells(row: dict[Any, Any], where: str) -> None:
    if any(map(str.strip, row.get(None, ()))):
        raise UserError(
            f"{where}: more cells than the header has; put quotes around a cell with a comma"
        )
    for column, cell in row.items():
        if column not in ("path", None) and not is_text(cell):
            raise UserError(
                f"{where}: the {column} {printable(cell)} is not UTF-8; save the table as UTF-8"
            )


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

    # where no file can be made, filelock would wait: it takes ENOENT for a race
    path.open("ab").close()
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        tell(
            f"no locks on the file system of {path.parent}: see to it that only one process works there"
        )
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
        raise UserError(
            f"cannot lock {path}, so nothing can be put into {path.parent}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        lock.release()

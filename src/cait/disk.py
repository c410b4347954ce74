"""Files and folders that are whole after a kill at any moment: the old one or the new one."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from cait.errors import UserError, one_line, printable

AWAY = ".away.tmp"
"""Suffix of a file or folder that was moved away to make room for another."""
TABLE: Any = dict(newline="", encoding="utf-8", errors="surrogateescape")
"""How files with the names of images are opened: names may hold bytes that are not text."""


def open_file(path: str | Path, limit: int | None = None, within: Path | None = None) -> BinaryIO:
    """Open a regular file to read. A pipe would wait for a writer, and a device may never end.

    Args:
        path: of the file; a link is followed.
        limit: bytes that the file may have; None sets no limit.
        within: a run's folder, which may be a stranger's; a link that leads out of it is refused.

    Raises:
        UserError: it is no regular file, is larger than `limit`, or lies outside of `within`.
        OSError: it cannot be opened.
    """
    if within is not None and not Path(path).resolve().is_relative_to(within.resolve()):
        raise UserError(f"{path} is a link out of the folder {within}")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for a pipe's writer
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file")
        if limit is not None and status.st_size > limit:
            raise UserError(f"{path} has {status.st_size:,} bytes, more than the {limit:,} that are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def scratch(path: Path) -> Path:
    """Where this process writes a file before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: a kill leaves the old file or the new one.

    An OSError names `path`, for which somebody asked.
    """
    beside = scratch(path)
    try:
        yield beside
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(beside)):
            error.filename = str(path)
        raise


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table whole."""
    with whole(path) as beside, beside.open("w", **TABLE) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_json(path: Path, content: Any) -> None:
    """Write a value whole, in one line."""
    with whole(path) as beside:
        # A name that is no text is escaped, which JSON allows.
        beside.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")


def read_csv(path: Path, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line of each row of a table of images, and its cells by column in lower case; errors call the table `name`.

    A path may hold bytes that are no text, as names of files may; other cells may not.

    Raises:
        UserError: it cannot be read, has no column `path` or one twice, or a row has a cell without a column.
    """
    try:
        with TextIOWrapper(open_file(path), **TABLE | {"encoding": "utf-8-sig"}) as file:  # Excel begins with a mark
            reader = csv.reader(file, strict=True)
            columns = [column.strip().lower() for column in next(reader, [])]
            _check_columns(columns, name)
            for cells in filter(None, reader):
                yield reader.line_num, _row(columns, cells, f"{name}, line {reader.line_num}")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error
    except csv.Error as error:
        raise UserError(f"{name}, line {reader.line_num}, is no CSV file: {one_line(error)}") from error


def _check_columns(columns: Sequence[str], name: str) -> None:
    if not is_text("".join(columns)) or any("\0" in column for column in columns):
        raise UserError(f"{name}, line 1: not UTF-8, perhaps UTF-16; save the table as UTF-8")
    if "path" not in columns:
        raise UserError(f"{name} has no column `path`, it has {printable(', '.join(columns)) or 'none'}")
    if twice := [column for column, count in Counter(columns).items() if column and count > 1]:
        raise UserError(f"{name} has two columns `{printable(twice[0])}`")


def _row(columns: Sequence[str], cells: Sequence[str], where: str) -> dict[str, str]:
    if any(map(str.strip, cells[len(columns) :])):
        more = f"{len(cells)} cells, the header has {len(columns)}"
        raise UserError(f"{where}: {more}; put quotes around a cell with a comma")
    row = dict(zip_longest(columns, cells[: len(columns)], fillvalue=""))
    for column, cell in row.items():
        if column != "path" and not is_text(cell):
            raise UserError(f"{where}: the {column} {printable(cell)} is not UTF-8; save the table as UTF-8")
    return row


def is_text(name: str) -> bool:
    """Whether a name from the disk is UTF-8."""
    with suppress(UnicodeEncodeError):
        name.encode()
        return True
    return False


def replace(beside: Path, path: Path, previous: Path | None = None) -> None:
    """Move the file or folder `beside` to `path`, and keep what was at `path` as `previous`.

    A kill at any moment leaves the old one or the new one. No rename replaces a folder, so the one that has to go is
    moved away first. After a kill between those renames, `clear_scratch` puts it back.
    """
    if any(place is not None and place.is_dir() for place in (beside, path, previous)):
        _replace_folder(beside, path, previous)
        return
    if previous is not None and path.exists():
        _keep(path, previous)
    os.replace(beside, path)
    flush(path.parent)


def _keep(path: Path, previous: Path) -> None:
    """Give the file at `path` the name `previous` too."""
    link = scratch(previous)
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: `path` is missing until the new file takes its place
        os.replace(path, previous)
    else:
        os.replace(link, previous)


def _replace_folder(beside: Path, path: Path, previous: Path | None) -> None:
    if beside.is_dir():
        flush(beside)
    displaced = previous or path
    away = displaced.with_name(f".{displaced.name}{AWAY}")
    remove(away)
    if path.exists():
        if displaced.exists():
            displaced.rename(away)
        if previous is not None:
            path.rename(previous)
    beside.rename(path)
    flush(path.parent)
    with suppress(OSError):  # NFS keeps a folder that somebody reads; `clear_scratch` comes back to it
        remove(away)


def cause_of(error: BaseException) -> str:
    """Why a file could not be written. torch.save wraps the error of a full disk in a RuntimeError."""
    cause = error if isinstance(error, OSError) else error.__context__ or error
    return getattr(cause, "strerror", None) or str(cause)


def check_folder(path: Path) -> None:
    """Raise UserError if `path`, where --output wants a folder, is a file."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; name a folder with --output")


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
    """Remove what killed processes left half written, and put back what they had moved away."""
    for path in list(folder.rglob(".*.tmp")):
        place = path.with_name(path.name.removeprefix(".").removesuffix(AWAY))
        if path.name.endswith(AWAY) and not place.exists():
            path.rename(place)
            continue
        with suppress(OSError):  # a process that has lost process 0 may still write there
            remove(path)

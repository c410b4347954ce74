"""A lock for what only one process should do, such as a download, or to train in a folder."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from cait.errors import UserError, printable

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What `flock` answers on a file system without locks, as Lustre mounted without `flock`, or NFS 3 without lockd."""
QUIET = 20.0
"""Seconds to wait before a line says for what."""


def acquire(path: Path, seconds: float) -> BaseFileLock:
    """Lock the file `path` until the lock's `release`, or until this process ends, however it ends.

    It works between the processes of a machine, and over a shared file system that has locks. Where there are none, a
    line says so, and it is up to the user that only one process does the work. Raises Timeout if another process has
    held it for so many seconds; -1 waits for ever.
    """
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
            lock = acquire(path, QUIET)
        except Timeout:
            tell(f"waiting for {path}, which another process holds")
            lock = acquire(path, -1)
    except OSError as error:
        raise UserError(f"cannot lock {path}, so nothing can be put into {path.parent}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def tell(line: str) -> None:
    """Say something on the side: what a verb prints may be read by a program."""
    with suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(printable(line), file=sys.stderr, flush=True)

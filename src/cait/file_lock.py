"""A lock for what only one process should do, such as a download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from cait.errors import UserError


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for the lock on the file `path`, then hold it; it is released when the process ends, however it ends.

    It works between the processes of a machine, and over a shared file system that has locks.

    Raises:
        UserError: the file cannot be written or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(path).acquire()
    except OSError as error:
        raise UserError(f"cannot lock {path}, so nothing can be put into {path.parent}: {error.strerror}") from error
    with held:
        yield

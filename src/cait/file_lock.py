"""A lock for what only one process should do, such as a download, or to train in a folder."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from cait.errors import UserError, printable

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What `flock` answers on a file system without locks, as Lustre mounted without `flock`, or NFS 3 without lockd.

filelock's own fallback knows ENOSYS alone, and no other machine takes over the soft lock that it falls back to.
"""
LEASE, RENEWAL = 60.0, 15.0
"""Seconds after which a lease that nobody renews is taken over, and between two renewals."""
QUIET = 20.0
"""Seconds to wait before a line says for what."""
PATIENCE = 12 * 3600.0
"""Seconds after which a process no longer waits: longer than any download or unpacking takes."""
TOLD: set[Path] = set()
"""Folders for which this process has printed that it waits."""


class Lock:
    """A lock on the file `path`, released when the process ends, however it ends.

    It works between the processes of a machine, and over a shared file system that has locks. Where there are none, a
    lease takes its place: a file beside it that names the holder, who renews it. Another process takes it over if the
    holder was on this machine and is gone, or if nobody has renewed it while that process has watched for a minute. It
    compares no two clocks. All machines must mount the file system alike, with locks or without.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: BaseFileLock = FileLock(path, fallback_to_soft=False)

    @property
    def lease(self) -> Path | None:
        """The file that stands for the lock on a file system without locks; None where there are locks."""
        return lease_of(self.path) if isinstance(self._lock, SoftFileLease) else None

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over the lease, because this one was held up for too long."""
        return isinstance(self._lock, SoftFileLease) and self._lock.compromise is not None

    def acquire(self, seconds: float, stop: Callable[[], bool] | None = None) -> None:
        """Raises Timeout after `seconds` or when `stop` says so, and OSError if the file cannot be written."""
        self.path.open("ab").close()  # where no file can be made, filelock would wait: it takes ENOENT for a race
        try:
            self._lock.acquire(timeout=seconds, cancel_check=stop)
        except OSError as error:
            if error.errno not in NO_LOCKS or self.lease:
                raise
            self._lock = SoftFileLease(lease_of(self.path), lease_duration=LEASE, heartbeat_interval=RENEWAL)
            self._lock.acquire(timeout=seconds, cancel_check=stop)
        if not self.lease:
            with suppress(OSError):  # only to tell who holds it
                self.path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")

    def acquire_from_the_dead(self, seconds: float) -> None:
        """`acquire`; but where a lease takes the lock's place, watch it until it is renewed or can be taken over.

        Raises:
            Timeout: the holder lives.
            OSError: the file cannot be written.
        """
        try:
            self.acquire(seconds)
        except Timeout:
            if not self.lease:
                raise
            tell(f"{self.path.parent} is held by {self.holder()}; waiting up to {LEASE:.0f} s to see whether it lives")
            before = _renewed(self.lease)
            lease = self.lease
            self.acquire(LEASE + RENEWAL, lambda: _renewed(lease) not in (None, before))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def holder(self) -> str:
        """Who holds the lock, as far as that is known."""
        if isinstance(self._lock, SoftFileLease):
            owner = self._lock.owner
            return f"process {owner.pid} on {owner.hostname}" if owner else "another process"
        try:
            return self.path.read_text() or "another process"
        except (OSError, UnicodeDecodeError):
            return "another process"


def lease_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


def _renewed(lease: Path) -> int | None:
    try:
        return lease.stat().st_mtime_ns
    except OSError:
        return None


def is_leased(path: Path) -> bool:
    """Whether somebody renews the lease that stands for the lock on `path`; by this machine's clock."""
    renewed = _renewed(lease_of(path))
    return renewed is not None and time.time() - renewed / 1e9 < LEASE


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for the lock on the file `path`, then hold it. After some seconds a line says for whom this process waits.

    Raises:
        UserError: the file cannot be written or locked, or somebody has held it for half a day.
    """
    lock = Lock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(QUIET)
        except Timeout:
            if path.parent not in TOLD:  # once: a slow network would make a line of each download
                TOLD.add(path.parent)
                tell(f"waiting for {lock.lease or path}, which {lock.holder()} holds")
            lock.acquire(PATIENCE)
    except Timeout as error:
        held = f"{lock.lease or path} has been held for {PATIENCE / 3600:.0f} hours by {lock.holder()}"
        raise UserError(f"{held}; end it if it hangs, or delete the file if it is gone") from error
    except OSError as error:
        raise UserError(f"cannot lock {path}, so nothing can be put into {path.parent}: {error.strerror}") from error
    with lock:
        yield


def tell(line: str) -> None:
    """Say something on the side: what a verb prints may be read by a program."""
    with suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(printable(line), file=sys.stderr, flush=True)

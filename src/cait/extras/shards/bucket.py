"""Shards in a bucket: LitData fetches, and a folder of bounded size keeps the chunks that were used last."""

from __future__ import annotations

import hashlib
import os
import time
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from cait.errors import UserError, one_line
from cait.extras.shards import INDEX
from cait.file_lock import file_lock

ATTEMPTS_AT_FIRST, ATTEMPTS = 3, 8
"""How often a request is tried: at the start, where a wrong address is likely, and in a run, which survives a minute
without the network."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
"""How long one try may wait for a connection, and for the next bytes."""


class Piece(NamedTuple):
    """A file of the shards: its name below their root, its bytes and their SHA-256."""

    name: str
    size: int
    sha256: str


class Bucket:
    """Shards in a bucket, as `cait.extras.shards.source.Place`.

    All processes of a machine may share the cache, whatever they read. One of them reserves room for a chunk,
    removing those used longest ago if it must. Then it fetches the chunk, verifies its checksum and puts it there by a
    rename. LitData's own cache is not used: read in a random order, it keeps nothing.

    Args:
        url: s3://bucket/folder or gs://bucket/folder.
        cache_dir: folder of the cache.
        limit: bytes that the chunks in it may take.
    """

    def __init__(self, url: str, cache_dir: Path, limit: int) -> None:
        self.url, self.cache_dir, self.limit = url, cache_dir, limit
        self.folder = cache_dir
        """Where the files of these shards are kept."""

    def index(self) -> bytes:
        _check_installed(self.url)
        self.fetch(INDEX, 0, 1, ATTEMPTS_AT_FIRST)  # says what is wrong; the next would only say that it was not found
        content = BytesIO()
        try:
            _downloader(os.getpid(), self.url, ATTEMPTS).download_fileobj(f"{self.url}/{INDEX}", content)
        except Exception as error:
            raise UserError(f"cannot read {self.url}/{INDEX}: {one_line(error)}") from error
        # Named after the index, so that shards that have changed are not mistaken for the old ones.
        self.folder = self.cache_dir / hashlib.sha256(content.getvalue()).hexdigest()[:16]
        return content.getvalue()

    def fetch(self, name: str, start: int, size: int, attempts: int = ATTEMPTS) -> bytes:
        """Part of a file, in one request. Raises UserError."""
        address = f"{self.url}/{name}"
        try:
            return _downloader(os.getpid(), self.url, attempts).download_bytes(address, start, size, "")
        except Exception as error:  # of many kinds: the bucket's, the network's, the credentials'
            raise UserError(f"cannot read {address}: {one_line(error) or type(error).__name__}") from error

    def whole(self, piece: Piece) -> bytes:
        path = self.folder / piece.name
        with self._lock(path):
            if path.is_file():
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() == piece.sha256:
                    return data
            data = self._verified(piece)
            self._put(data, path)
        return data

    def read_alone(self, piece: Piece, start: int, size: int) -> bytes:
        """Read without keeping anything: from the cache if the chunk is there, otherwise in a request of its own."""
        data = self._cached(self.folder / piece.name, start, size)
        return self.fetch(piece.name, start, size) if data is None else data

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """Read from the cache; a missing chunk is put there first."""
        path = self.folder / piece.name
        while (data := self._cached(path, start, size)) is None:
            with self._lock(path):
                if not path.is_file():
                    return self._download(piece, path)[start : start + size]
        return data

    def _cached(self, path: Path, start: int, size: int) -> bytes | None:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            os.utime(file)  # the chunks used longest ago go first
            data = os.pread(file, size, start)
        finally:
            os.close(file)
        if len(data) == size:
            return data
        path.unlink(missing_ok=True)  # somebody has truncated it
        return None

    def _lock(self, path: Path) -> Any:
        return file_lock(path.with_suffix(".lock"))

    def _download(self, piece: Piece, path: Path) -> bytes:
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # a killed process has left it; its room would be reserved twice
        try:
            self._reserve(part, piece.size)
            data = self._verified(piece)
            self._put(data, path)
        finally:
            part.unlink(missing_ok=True)
        return data

    def _verified(self, piece: Piece) -> bytes:
        for _ in range(2):
            data = self.fetch(piece.name, 0, piece.size)
            if hashlib.sha256(data).hexdigest() == piece.sha256:
                return data
        raise UserError(f"{self.url}/{piece.name} is damaged: its checksum is not the one in {INDEX}")

    def _put(self, data: bytes, path: Path) -> None:
        """Write a whole file in place of the one that reserved its room."""
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("r+b" if part.exists() else "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # only what is on the disk was verified
            part.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; see --data.data_dir") from error

    def _reserve(self, part: Path, size: int) -> None:
        """Remove chunks until `size` more bytes are within the limit, and reserve them with an empty file."""
        with file_lock(self.cache_dir / ".lock"):
            while self._used() + size > self.limit:
                if not self._remove_oldest():
                    time.sleep(0.05)  # other processes will soon finish their chunks, which can then be removed
            try:
                part.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as file:
                    file.truncate(size)
            except OSError as error:
                raise UserError(f"cannot write {part}: {error.strerror}; see --data.data_dir") from error

    def _files(self, kind: str) -> list[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of the chunks in the cache."""
        found = []
        for path in self.cache_dir.glob(f"*/*/chunk-*{kind}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # just removed, or just renamed
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def _used(self) -> int:
        # Parts first: a chunk that gets its final name between the two listings counts twice. In the other order it
        # would not count at all.
        return sum(size for _, size, _ in self._files(".part") + self._files(".bin"))

    def _remove_oldest(self) -> bool:
        """Remove what a killed process has left, otherwise the oldest chunk; False if there is nothing to remove."""
        for _, _, part in self._files(".part"):
            lock = FileLock(part.with_suffix(".lock"))
            try:
                with lock.acquire(timeout=0):
                    part.unlink(missing_ok=True)
                    return True
            except Timeout:
                pass
        for _, _, path in self._files(".bin"):
            path.unlink(missing_ok=True)
            return True
        return False


def _check_installed(url: str) -> None:
    try:
        import_module("litdata")
    except ImportError as error:
        raise UserError(f"{url} is read by LitData: .venv/bin/pip install --editable '.[stream]'") from error
    if url.startswith("gs://"):
        try:
            import_module("google.cloud.storage")
        except ImportError as error:
            raise UserError(f"{url} needs Google's package: .venv/bin/pip install google-cloud-storage") from error


@cache
def _downloader(process: int, url: str, attempts: int) -> Any:
    """LitData's reader of a bucket; each process has its own."""
    from litdata.streaming.downloader import get_downloader

    options: dict[str, Any] = {}
    if url.startswith("s3://"):
        from botocore.config import Config

        retries: Any = {"total_max_attempts": attempts, "mode": "standard"}  # LitData would try 1,000 times
        options["config"] = Config(retries=retries, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
    return get_downloader(url, "", [], options)

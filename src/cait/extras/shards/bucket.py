"""Shards in a bucket: LitData fetches, and a folder of bounded size keeps the chunks that were used last."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from cait import disk
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

    def is_in(self, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.sha256


def read_part(path: Path, start: int, size: int) -> bytes:
    """At most `size` bytes of a file. The file is not kept open, so a worker holds none and a cache may remove it."""
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, start)


class Bucket:
    """Shards in a bucket, to be read like those in a `cait.extras.shards.source.Folder`.

    All processes of a machine may share the cache, whatever they read. For each chunk that is missing, one of them
    fetches it, verifies its checksum, removes the chunks used longest ago until there is room, and puts it there by a
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
        address, content = f"{self.url}/{INDEX}", BytesIO()
        reader = _downloader(os.getpid(), self.url, ATTEMPTS_AT_FIRST)
        try:
            reader.download_bytes(address, 0, 1, "")  # it says what is wrong; the next would only say that nothing is
            reader.download_fileobj(address, content)
        except Exception as error:  # of many kinds: the bucket's, the network's, the credentials'
            raise _unreadable(address, error) from error
        # Named after the index, so that shards that have changed are not mistaken for the old ones.
        self.folder = self.cache_dir / hashlib.sha256(content.getvalue()).hexdigest()[:16]
        return content.getvalue()

    def whole(self, piece: Piece) -> bytes:
        path = self.folder / piece.name
        with file_lock(path.with_suffix(".lock")):
            if path.is_file() and piece.is_in(data := path.read_bytes()):
                return data
            return self._download(piece, path)

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """Read from the cache; a missing chunk is put there first."""
        path = self.folder / piece.name
        if (data := _cached(path, start, size)) is None:
            with file_lock(path.with_suffix(".lock")):
                if (data := _cached(path, start, size)) is None:  # otherwise another process has fetched it meanwhile
                    data = self._download(piece, path)[start : start + size]
        return data

    def read_alone(self, piece: Piece, start: int, size: int) -> bytes:
        """Read without keeping anything: from the cache if the chunk is there, otherwise in a request of its own."""
        data = _cached(self.folder / piece.name, start, size)
        return self._fetch(piece, start, size) if data is None else data

    def _fetch(self, piece: Piece, start: int, size: int) -> bytes:
        address = f"{self.url}/{piece.name}"
        try:
            return _downloader(os.getpid(), self.url, ATTEMPTS).download_bytes(address, start, size, "")
        except Exception as error:
            raise _unreadable(address, error) from error

    def _download(self, piece: Piece, path: Path) -> bytes:
        data = self._fetch(piece, 0, piece.size)
        if not piece.is_in(data):
            raise UserError(f"{self.url}/{piece.name} is damaged: its checksum is not the one in {INDEX}")
        try:
            self._keep(data, path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; see --data.data_dir") from error
        return data

    def _keep(self, data: bytes, path: Path) -> None:
        """Put a file into the cache, and make room for it. One process at a time does."""
        with file_lock(self.cache_dir / ".lock"):
            for part in self.cache_dir.glob("*/*/*.part"):
                part.unlink()  # a killed process has left it: whoever writes one holds the lock
            chunks = [(chunk.stat(), chunk) for chunk in self.cache_dir.glob("*/*/chunk-*.bin")]
            used = sum(status.st_size for status, _ in chunks)
            for status, chunk in sorted(chunks, key=lambda each: each[0].st_mtime_ns):
                if used + len(data) > self.limit:
                    chunk.unlink()
                    used -= status.st_size
            part = path.with_suffix(".part")
            part.write_bytes(data)
            disk.flush(part)  # only what is on the disk was verified
            part.replace(path)


def _cached(path: Path, start: int, size: int) -> bytes | None:
    """Part of a chunk in the cache; None if the chunk is missing or somebody has truncated it."""
    try:
        os.utime(path)  # the chunks used longest ago go first
        data = read_part(path, start, size)
    except FileNotFoundError:
        return None
    return data if len(data) == size else None


def _unreadable(address: str, error: Exception) -> UserError:
    return UserError(f"cannot read {address}: {one_line(error) or type(error).__name__}")


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

    options = {}
    if url.startswith("s3://"):
        from botocore.config import Config

        retries: Any = {"total_max_attempts": attempts, "mode": "standard"}  # LitData would try 1,000 times
        options["config"] = Config(retries=retries, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
    return get_downloader(url, "", [], options)

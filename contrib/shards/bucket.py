"""Shards in a bucket, and a folder of bounded size that keeps the chunks that were used last."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cait import disk
from cait.errors import UserError, one_line, to_install
from contrib.shards import INDEX

ATTEMPTS_AT_FIRST, ATTEMPTS = 3, 8
"""How often a request is tried: at the start, where a wrong address is likely, and in a run, which survives a minute
without the network."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
"""How long one try may wait for a connection, and for the next bytes."""
GOOGLE = "https://storage.googleapis.com"


class Piece(NamedTuple):
    """A file of the shards: its name below their root, its bytes and their SHA-256."""

    name: str
    size: int
    sha256: str

    def is_in(self, data: bytes) -> bool:
        return hashlib.sha256(data).hexdigest() == self.sha256


def read_part(path: str | Path, start: int, size: int) -> bytes:
    """At most `size` bytes of a file. The file is not kept open, so a worker holds none and a cache may remove it.

    Not mapped into memory: there a failing disk kills the process without a word.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # with `Path.open` and `seek` a read takes twice the time
    try:
        data = os.pread(file, size, start)
        while len(data) < size and (more := os.pread(file, size - len(data), start + len(data))):
            data += more  # one call of the system reads 2 GiB at most
        return data
    finally:
        os.close(file)


class Bucket:
    """Shards in a bucket, to be read like those in a `contrib.shards.source.Folder`.

    All processes of a machine may share the cache, whatever they read. One of them fetches a missing chunk, verifies
    its checksum, removes the chunks used longest ago until there is room, and puts it there by a rename.

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
        content = self._fetch(INDEX, attempts=ATTEMPTS_AT_FIRST)
        # Named after the index, so that shards that have changed are not mistaken for the old ones.
        self.folder = self.cache_dir / hashlib.sha256(content).hexdigest()[:16]
        return content

    def check(self, piece: Piece) -> None:
        if piece.size > self.limit:
            raise UserError(f"a chunk of {self.url} has {piece.size / 1e9:.2f} GB: raise --data.cache_gb")

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """Read from the cache; a missing file is put there first."""
        path = self.folder / piece.name
        if (data := _cached(path, start, size)) is None:
            with disk.file_lock(path.with_suffix(".lock")):
                if (data := _cached(path, start, size)) is None:  # otherwise another process has fetched it meanwhile
                    data = self._download(piece, path)[start : start + size]
        return data

    def read_alone(self, piece: Piece, start: int, size: int) -> bytes:
        """Read without keeping anything: from the cache if the chunk is there, otherwise in a request of its own."""
        data = _cached(self.folder / piece.name, start, size)
        return self._fetch(piece.name, start, size) if data is None else data

    def _fetch(self, name: str, start: int = 0, size: int | None = None, attempts: int = ATTEMPTS) -> bytes:
        """Part of a file, or all of it, in one request. Raises UserError."""
        if size == 0:
            return b""
        address = f"{self.url}/{name}"
        scheme, _, place = address.partition("://")
        bucket, _, key = place.partition("/")
        part = f"bytes={start}-{'' if size is None else start + size - 1}"
        try:
            answer = client(os.getpid(), endpoint(scheme), attempts).get_object(Bucket=bucket, Key=key, Range=part)
            return answer["Body"].read()
        except ImportError as error:
            raise UserError(f"{address} is read by boto3: {to_install('[stream]')}") from error
        except Exception as error:  # of many kinds: the bucket's, the network's, the credentials'
            raise UserError(f"cannot read {address}: {one_line(error) or type(error).__name__}") from error

    def whole(self, piece: Piece) -> bytes:
        """All of a file; one that is damaged in the cache is fetched again."""
        data = self.read(piece, 0, piece.size)
        if piece.is_in(data):
            return data
        (self.folder / piece.name).unlink(missing_ok=True)
        return self.read(piece, 0, piece.size)

    def _download(self, piece: Piece, path: Path) -> bytes:
        data = self._fetch(piece.name)
        if not piece.is_in(data):
            data = self._fetch(piece.name)  # the transfer may have damaged it
        if not piece.is_in(data):
            raise UserError(f"{self.url}/{piece.name} is damaged: its checksum is not the one in {INDEX}")
        try:
            self._keep(data, path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; see --data.data_dir") from error
        return data

    def _keep(self, data: bytes, path: Path) -> None:
        """Put a file into the cache, and make room for it. One process at a time does."""
        with disk.file_lock(self.cache_dir / ".lock"):
            self._make_room(len(data))
            part = path.with_suffix(".part")
            part.write_bytes(data)
            disk.flush(part)  # only what is on the disk was verified
            part.replace(path)

    def _make_room(self, size: int) -> None:
        """Remove the chunks used longest ago until `size` bytes fit. To count 400 chunks takes 8 ms."""
        for part in self.cache_dir.glob("*/*/*.part"):
            part.unlink()  # a killed process has left it: whoever writes one holds the lock
        found = [(status, chunk) for chunk in self.cache_dir.glob("*/*/chunk-*.bin") if (status := _status(chunk))]
        used = sum(status.st_size for status, _ in found)
        for status, chunk in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if used + size <= self.limit:
                return
            chunk.unlink(missing_ok=True)
            used -= status.st_size


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # damaged, so it was removed
        return None


def _cached(path: Path, start: int, size: int) -> bytes | None:
    """Part of a file in the cache; None if it is missing or somebody has truncated it."""
    try:
        os.utime(path)  # the chunks used longest ago go first
        data = read_part(path, start, size)
    except FileNotFoundError:
        return None
    return data if len(data) == size else None


def endpoint(scheme: str) -> str | None:
    """The address that serves buckets; None is Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL") or (GOOGLE if scheme == "gs" else None)


@cache
def client(process: int, endpoint_url: str | None, attempts: int) -> Any:
    """A client of S3, or of Google's buckets, which speak its language too; each process has its own."""
    import boto3
    from botocore.config import Config

    retries: Any = {"total_max_attempts": attempts, "mode": "standard"}
    config = Config(retries=retries, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
    return boto3.Session().client("s3", config=config, endpoint_url=endpoint_url)

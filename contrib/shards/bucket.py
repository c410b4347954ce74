"""Where the files of shards lie: in a folder, or in a bucket behind a folder that keeps the chunks used last."""

import hashlib
import math
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cait import disk
from cait.errors import OutageError, UserError, one_line, tell_once, to_install
from contrib.shards import INDEX

PATIENCE = 600.0
"""Seconds for which a request is tried again while the bucket or the network fails."""
PAUSES = (1.0, 15.0)
"""Seconds between the first two tries, and the most; each pause is twice the one before."""
CONNECT_SECONDS = 10
"""How long one try may wait for a connection."""
READ_SECONDS = 60
"""How long it may wait for the next bytes."""
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
    # with `Path.open` and `seek` a read takes twice the time
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = more = os.pread(file, size, start)
        while more and len(data) < size:  # one call of the system reads 2 GiB at most
            more = os.pread(file, size - len(data), start + len(data))
            data += more
        return data
    finally:
        os.close(file)


class Folder:
    """Shards in a folder, local or mounted. All methods raise UserError if a file is missing or damaged."""

    limit = math.inf
    """Bytes of chunks for which there is room."""

    def __init__(self, root: str) -> None:
        self.root = root

    def index(self) -> bytes:
        """The bytes of shards.json."""
        try:
            return Path(self.root, INDEX).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.root}/{INDEX}: {error.strerror}") from error

    def check(self, piece: Piece) -> None:
        """Check that a chunk is there, to its last byte."""
        self.read(piece, piece.size - 1, 1)

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on."""
        path = f"{self.root}/{piece.name}"
        try:
            data = read_part(path, start, size)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if len(data) < size:
            raise UserError(f"{path} is cut off: copy it again")
        return data

    def whole(self, piece: Piece) -> bytes:
        """All of a file, compared with its checksum."""
        return self.compared(piece, self.read(piece, 0, piece.size))

    def compared(self, piece: Piece, data: bytes) -> bytes:
        if not piece.is_in(data):
            raise UserError(
                f"{self.root}/{piece.name} is damaged: its checksum is not the one in {INDEX}"
            )
        return data


class Bucket(Folder):
    """Shards in a bucket.

    All processes of a machine may share the cache, whatever they read. One of them fetches a missing chunk, compares
    its checksum, removes the chunks used longest ago until there is room, and puts it there by a rename.

    Args:
        root: s3://bucket/folder or gs://bucket/folder.
        limit: bytes that the chunks in it may take.
    """

    def __init__(self, root: str, cache_dir: Path, limit: int) -> None:
        super().__init__(root)
        self.cache_dir = cache_dir
        self.limit = limit
        self.folder = cache_dir
        """Where the files of these shards are kept."""

    def index(self) -> bytes:
        content = self._fetch(INDEX)
        # Named after the index, so that shards that have changed are not mistaken for the old ones.
        self.folder = self.cache_dir / hashlib.sha256(content).hexdigest()[:16]
        return content

    def check(self, piece: Piece) -> None:
        if piece.size > self.limit:
            raise UserError(
                f"a chunk of {self.root} has {piece.size / 1e9:.2f} GB: raise --data.cache_gb"
            )

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """Read from the cache; a missing file is put there first."""
        path = self.folder / piece.name
        data = _cached(path, start, size)
        if data is not None:
            return data
        with disk.file_lock(path.with_suffix(".lock")):
            data = _cached(path, start, size)
            if data is None:  # otherwise another process has fetched it meanwhile
                data = self._download(piece)[start : start + size]
        return data

    def whole(self, piece: Piece) -> bytes:
        """As of a folder; a file that is damaged in the cache is fetched again."""
        data = self.read(piece, 0, piece.size)
        return data if piece.is_in(data) else self._download(piece)

    def _download(self, piece: Piece) -> bytes:
        """Fetch a file into the cache, where one process at a time writes and removes."""
        data = self._fetch(piece.name)
        if not piece.is_in(data):
            data = self.compared(piece, self._fetch(piece.name))  # the transfer may have damaged it
        path = self.folder / piece.name
        try:
            with disk.file_lock(self.cache_dir / ".lock"):
                self._make_room(len(data))
                with disk.atomic_write(path) as beside:
                    beside.write_bytes(data)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; see --data.data_dir"
            ) from error
        return data

    def _make_room(self, size: int) -> None:
        """Remove what killed processes have left, and the chunks used longest ago until `size` bytes fit."""
        disk.clear_scratch(self.cache_dir)
        chunks = [(path.stat(), path) for path in self.cache_dir.glob("*/*/chunk-*.bin")]
        used = sum(status.st_size for status, _ in chunks)
        for status, path in sorted(chunks, key=lambda chunk: chunk[0].st_mtime_ns):
            if used + size > self.limit:
                path.unlink()
                used -= status.st_size

    def _fetch(self, name: str) -> bytes:
        """A file. Raises UserError, and OutageError after `PATIENCE` seconds of failures."""
        address = f"{self.root}/{name}"
        scheme, _, path = address.partition("://")
        bucket, _, key = path.partition("/")
        end = time.monotonic() + PATIENCE
        pause, longest = PAUSES
        while True:
            try:
                return (
                    client(os.getpid(), endpoint(scheme))
                    .get_object(Bucket=bucket, Key=key)["Body"]
                    .read()
                )
            except ImportError as error:
                raise UserError(f"{address} is read by boto3: {to_install('[stream]')}") from error
            # of many kinds: the bucket's, the network's, the credentials'
            except Exception as error:
                problem = f"cannot read {address}: {one_line(error) or type(error).__name__}"
                if not may_pass(error):
                    raise UserError(problem) from error
                if time.monotonic() + pause > end:
                    raise OutageError(problem) from error
            tell_once(f"{problem}; it is tried again for {PATIENCE / 60:g} minutes")
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _cached(path: Path, start: int, size: int) -> bytes | None:
    """Part of a file in the cache; None if it is missing or somebody has truncated it."""
    try:
        os.utime(path)  # the chunks used longest ago go first
        data = read_part(path, start, size)
    except FileNotFoundError:
        return None
    return data if len(data) == size else None


def may_pass(error: Exception) -> bool:
    """Whether a request that has failed may succeed later as it stands."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return status >= 500 or status in (408, 429)
    return isinstance(
        error,
        exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError,
    )


def endpoint(scheme: str) -> str | None:
    """The address that serves buckets; None is Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL") or (GOOGLE if scheme == "gs" else None)


@cache
def client(process: int, endpoint_url: str | None) -> Any:
    """A client of S3, or of Google's buckets, which speak its language too; each process has its own."""
    import boto3
    from botocore.config import Config

    return boto3.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        config=Config(
            # `Bucket` tries again, also where an answer ends amid its body
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
        ),
    )

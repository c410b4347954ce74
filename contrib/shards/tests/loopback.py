"""An S3-compatible server on this machine (moto), which counts the requests that read."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

KEYS = {"AWS_ACCESS_KEY_ID": "loopback", "AWS_SECRET_ACCESS_KEY": "loopback", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "pictures"


class Requests(logging.Handler):
    """The GET requests of the server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"GET (\S+)", re.sub(r"\x1b\[\d+m", "", record.getMessage()))
        if found:
            self.paths.append(found[1])

    def of(self, word: str) -> int:
        """How many were of a path with `word` in it."""
        return sum(word in path for path in self.paths)


@contextlib.contextmanager
def server() -> Iterator[Requests]:
    """Run the server with an empty bucket, and point boto3's variables at it."""
    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler

    WSGIRequestHandler.disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    log, requests, before = logging.getLogger("werkzeug"), Requests(), os.environ.copy()
    log.handlers, log.propagate = [requests], False
    with contextlib.redirect_stdout(None):
        running = ThreadedMotoServer("127.0.0.1", 0)
        running.start()
    log.setLevel(logging.INFO)
    host, port = running.get_host_and_port()
    os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    try:
        client().create_bucket(Bucket=BUCKET)
        yield requests
    finally:
        running.stop()
        os.environ.clear()
        os.environ.update(before)


def client():
    """boto3's client of the server."""
    import boto3

    return boto3.client("s3")


def upload(folder: Path, name: str) -> str:
    """Put the files of a folder under `name`, and return its address."""
    s3 = client()
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put_object(Bucket=BUCKET, Key=f"{name}/{path.relative_to(folder)}", Body=path.read_bytes())
    return f"s3://{BUCKET}/{name}"

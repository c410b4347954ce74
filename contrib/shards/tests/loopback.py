"""An S3-compatible server on this machine (moto), which counts the requests that read, and fails when it is told to."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

KEYS = {
    "AWS_ACCESS_KEY_ID": "loopback",
    "AWS_SECRET_ACCESS_KEY": "loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "pictures"


class Requests:
    """A WSGI application around moto's."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.moto = DomainDispatcherApplication(create_backend_app)
        self.paths: list[str] = []
        """Of the GET requests."""
        self.kind, self.until = "", 0.0

    def of(self, word: str) -> int:
        """How many were of a path with `word` in it."""
        return sum(word in path for path in self.paths)

    def fail(self, kind: str, seconds: float) -> None:
        """Answer for so long with status 500, "error", or end the answers amid their bodies, "cut"."""
        self.kind, self.until = kind, time.monotonic() + seconds

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return self.moto(environ, start_response)
        self.paths.append(environ["PATH_INFO"])
        failure = self.kind if time.monotonic() < self.until else ""
        if failure == "error":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self.moto(environ, start_response))
        return [body[: len(body) // 2] if failure == "cut" else body]


@contextlib.contextmanager
def server() -> Iterator[Requests]:
    """Run the server with an empty bucket, and point boto3's variables at it."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from werkzeug.serving import make_server

    MotoRequestHandler.disable_nagle_algorithm = (
        True  # otherwise each answer waits 40 ms for an acknowledgement
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    requests, before = Requests(), os.environ.copy()
    running = make_server("127.0.0.1", 0, requests, True, request_handler=MotoRequestHandler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{running.server_port}")
    try:
        client().create_bucket(Bucket=BUCKET)
        yield requests
    finally:
        running.shutdown()
        os.environ.clear()
        os.environ.update(before)


def client():
    """boto3's client of the server."""
    import boto3

    return boto3.client("s3")


def upload(folder: Path, name: str) -> str:
    """Put the files of a folder under `name`, and return its address."""
    for path in folder.rglob("*"):
        if path.is_file():
            client().upload_file(str(path), BUCKET, f"{name}/{path.relative_to(folder)}")
    return f"s3://{BUCKET}/{name}"

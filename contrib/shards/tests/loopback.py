"""An S3-compatible server on this machine (moto), which counts the requests that read, and fails when it is told to."""

import contextlib
import logging
import math
import threading

import pytest

BUCKET = "pictures"


class Requests:
    """A WSGI application around moto's."""

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.moto = DomainDispatcherApplication(create_backend_app)
        self.paths = []
        """Of the GET requests."""
        self.failure = ""
        self.failing = 0.0
        """How many of the next GET requests fail."""

    def count(self, word):
        """How many were of a path with `word` in it."""
        return sum(word in path for path in self.paths)

    def fail(self, failure, requests=math.inf):
        """Answer so many with status 500, "error", or end the answers amid their bodies, "cut"."""
        self.failure = failure
        self.failing = requests

    def __call__(self, environ, start):
        if environ["REQUEST_METHOD"] != "GET":
            return self.moto(environ, start)
        self.paths.append(environ["PATH_INFO"])
        fails = self.failing > 0
        self.failing -= 1
        if fails and self.failure == "error":
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self.moto(environ, start))
        return [body[: len(body) // 2] if fails and self.failure == "cut" else body]


@contextlib.contextmanager
def server():
    """Run the server with an empty bucket, and point boto3's variables at it."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from werkzeug.serving import make_server

    # otherwise each answer waits 40 ms for an acknowledgement
    MotoRequestHandler.disable_nagle_algorithm = True
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    requests = Requests()
    running = make_server("127.0.0.1", 0, requests, True, request_handler=MotoRequestHandler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "loopback")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "loopback")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.server_port}")
        client().create_bucket(Bucket=BUCKET)
        yield requests
    running.shutdown()


def client():
    """boto3's client of the server."""
    import boto3

    return boto3.client("s3")


def upload(folder, name):
    """Put the files of a folder under `name`, and return its address."""
    for path in folder.rglob("*"):
        if path.is_file():
            client().upload_file(str(path), BUCKET, f"{name}/{path.relative_to(folder)}")
    return f"s3://{BUCKET}/{name}"

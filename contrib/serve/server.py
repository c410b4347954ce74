"""LitServe's two processes: one takes requests and refuses bad ones, the other holds the network."""

import asyncio
import base64
import io
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from litserve import LitAPI, LitServer
from litserve.loops.simple_loops import BatchedLoop
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from cait.errors import UserError, told_as
from cait.settings import Settings
from cait.train.metrics import Best
from cait.train.prediction import classify

PAGE = Path(__file__).parent / "page.html"
MOST_BYTES = 20_000_000
"""Of one request."""
PLACES = asyncio.Semaphore(64)
"""The requests that are read and answered at a time. Another is told to come again."""
SECONDS = 30
"""For the bytes of a request to arrive."""
BATCH = 16
"""Images that go through the network together at most."""


async def image_of(request: Request) -> AsyncIterator[bytes]:
    """The image file in a request, which keeps its place until it is answered. Raises HTTPException."""
    if PLACES.locked():
        raise HTTPException(503, "too many requests at a time", {"Retry-After": "1"})
    async with PLACES:
        try:
            body = await asyncio.wait_for(whole(request), SECONDS)
        except TimeoutError as error:
            raise HTTPException(
                408, f"the image has not arrived within {SECONDS} seconds"
            ) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection broke off") from error
        if (kind := request.headers.get("content-type", "").lower()).startswith("multipart/"):
            raise HTTPException(
                415, "send the file as the body, as `curl --data-binary @FILE`, and not in a form"
            )
        if kind.startswith("application/json"):
            body = from_json(body)
        if not body:
            raise HTTPException(400, "the request holds no image")
        yield body


async def whole(request: Request) -> bytes:
    """The body of a request. Raises HTTPException if it is too large, but reads it: who still sends hears no answer."""
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        body += part if size <= MOST_BYTES else b""
    if size > MOST_BYTES:
        raise HTTPException(413, f"the request has more than {MOST_BYTES:,} bytes")
    return bytes(body)


def from_json(body: bytes) -> bytes:
    """The image file in {"image": "<base64>"}. Raises HTTPException."""
    try:
        return base64.b64decode(json.loads(body)["image"], validate=True)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HTTPException(400, 'JSON must be {"image": "<the file in base64>"}') from error


class Together(BatchedLoop):
    """Wait for an image, and take what else has come meanwhile. LitServe's own loop never sleeps."""

    def get_batch_requests(
        self, lit_api: LitAPI, request_queue: Any, transport: Any
    ) -> tuple[list, list]:
        """([(queue of the answer, id, image)], no request that waited too long)"""
        waiting = []
        with suppress(Empty):
            waiting.append(request_queue.get(timeout=1))
            while len(waiting) < lit_api.max_batch_size:
                waiting.append(request_queue.get_nowait())
        return [(queue, uid, image) for queue, uid, _, image in waiting], []


class Classifier(LitAPI):
    """POST /predict, in the process that holds the network.

    Args:
        load: gives a `cait.CaiTModule`, in that process.
        top_k: as `cait.train.prediction.predict` takes it.
    """

    def __init__(self, load: Callable[[], Any], top_k: int | None) -> None:
        super().__init__(max_batch_size=BATCH, loop=Together())
        self.load = load
        self.top_k = top_k

    def setup(self, device: str) -> None:
        # a terminal sends Ctrl-C to every process; this one ends last
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.module = self.load().to(device)

    def decode_request(self, request: Annotated[bytes, Depends(image_of)]) -> bytes:
        """The image file, which FastAPI has got from `image_of` in the other process."""
        return request

    def predict(self, images: list[bytes]) -> list[Best | UserError]:
        """The classes of each image, or why it cannot be read: an error that is raised would be that of all."""
        prepared = [self._prepared(image) for image in images]
        good = [pixels for pixels in prepared if not isinstance(pixels, UserError)]
        try:
            best = iter(classify(self.module, good, self.top_k) if good else ())
        except UserError as error:  # of an image, whose answers are not finite
            if len(images) == 1:
                return [error]
            return [self.predict([image])[0] for image in images]
        return [pixels if isinstance(pixels, UserError) else next(best) for pixels in prepared]

    def _prepared(self, image: bytes) -> Any:
        try:
            with told_as("the image cannot be prepared"):
                return self.module.transform(io.BytesIO(image))
        except UserError as error:
            return error

    def encode_response(self, output: Best | UserError) -> Any:
        """{"predictions": [...]} as a line of `cait predict`, or {"detail": "..."} as FastAPI's errors."""
        if isinstance(output, UserError):
            return JSONResponse({"detail": str(output)}, 422)
        return JSONResponse({"predictions": output})


def run(load: Callable[[], Any], about: Settings, top_k: int | None, host: str, port: int) -> None:
    """Serve until Ctrl-C, and answer the requests in flight; `about` is what /info says of the model."""
    # Without a timeout: PLACES bounds how long a request waits.
    server = LitServer(
        Classifier(load, top_k), model_metadata=about, timeout=False, disable_openapi_url=True
    )
    server.app.router.routes.insert(
        0, Route("/", lambda request: HTMLResponse(PAGE.read_text(encoding="utf-8")))
    )
    server.run(host, port, num_api_servers=1, log_level="warning", generate_client_file=False)

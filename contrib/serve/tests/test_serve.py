"""The server under good and bad requests from many clients, and when it is told to stop."""

import base64
import io
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from harness import LIMIT, SMALL, free_port, slow, start
from PIL import Image

import cait as package
from cait.cli import main
from cait.errors import UserError
from cait.run.program import Program
from cait.train.metrics import OneClass
from contrib.serve import verb
from contrib.tests import chromium

pytest.importorskip("litserve")
from contrib.serve.server import Classifier


class Server(NamedTuple):
    """A process of `cait serve`."""

    process: subprocess.Popen[str]
    port: int

    def ask(self, path: str, body: bytes | None = None, kind: str = "image/png") -> tuple[int, Any]:
        """(status, what the JSON says) of a GET, or of a POST with a body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": kind}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def half_sent(self, image: bytes) -> socket.socket:
        """A connection on which the last byte of an image is missing."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(image)
            + image[:-1]
        )
        return connection

    def memory(self) -> float:
        """MB that its processes hold alone."""
        main = psutil.Process(self.process.pid)
        return (
            sum(
                process.memory_full_info().uss for process in (main, *main.children(recursive=True))
            )
            / 1e6
        )


def begun(folder: Path, *options: str) -> Server:
    port = int(free_port())
    server = Server(start(folder, "serve", "digits", f"--port={port}", *options), port)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT).close()
            return server
        except OSError:
            time.sleep(0.2)
    server.process.kill()
    raise AssertionError(server.process.communicate()[0])


def test_an_image_without_finite_answers_costs_the_others_nothing() -> None:
    module: Any = torch.nn.Module()
    module.class_names, module.device, module.task = ["a", "b"], torch.device("cpu"), OneClass(2)
    module.transform, module.predict_step = (
        lambda image: torch.tensor(json.load(image)),
        lambda batch, _: batch[0],
    )
    classifier = Classifier(lambda: module, None)
    classifier.module = module
    good, bad, also_good, odd = classifier.predict(
        [b"[0.1, 0.9]", b"[NaN, NaN]", b"[0.8, 0.2]", b"?"]
    )
    assert (good[0]["class"], also_good[0]["class"]) == ("b", "a")
    assert (
        classifier.encode_response(bad).status_code
        == classifier.encode_response(odd).status_code
        == 422
    )
    # by a transform of one's own
    assert str(odd).startswith("the image cannot be prepared: JSONDecodeError")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        main(["fit", *SMALL, "--trainer.max_epochs=1", "--run_name=digits"])
    server = begun(place)
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=LIMIT)


def saved(image: Image.Image, kind: str = "png") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


BAD: list[Callable[[], tuple[int, bytes, str]]] = [
    lambda: (400, b"", "image/png"),
    lambda: (422, b"a text", "text/plain"),
    lambda: (413, bytes(30_000_000), "image/png"),
    lambda: (422, saved(Image.new("L", (20_000, 20_000))), "image/png"),
    lambda: (422, saved(Image.effect_noise((64, 64), 50), "jpeg")[:900], "image/jpeg"),
    lambda: (415, b"--x", "multipart/form-data; boundary=x"),
    lambda: (400, b'{"picture": "?"', "application/json"),
    lambda: (400, b'{"image": "no base64"}', "application/json"),
    lambda: (422, b'{"image": "bm8gaW1hZ2U="}', "application/json"),
]
"""Status, body and type of requests without a whole image."""


@pytest.mark.parametrize(("requests", "clients"), [(160, 8), *slow((2000, 16))])
def test_good_requests_get_the_classes_and_each_bad_one_a_line(
    server: Server,
    place: Path,
    requests: int,
    clients: int,
    record_property: Callable[[str, object], None],
) -> None:
    bad = [make() for make in BAD]
    files = sorted((place / "data/digits/val").glob("*/*.png"))
    expected = package.load(place / "logs/digits").predict([str(file) for file in files])

    def one(number: int) -> float:
        """Ask once; every tenth request is bad. Returns the largest difference of a probability."""
        if number % 10 == 9:
            status, body, kind = bad[number // 10 % len(bad)]
            found, said = server.ask("/predict", body, kind)
            assert (found, [*said]) == (status, ["detail"])
            assert said["detail"].isprintable()
            return 0.0
        body, kind = files[number % len(files)].read_bytes(), "image/png"
        if number % 3 == 0:
            body, kind = (
                json.dumps({"image": base64.b64encode(body).decode()}).encode(),
                "Application/JSON",
            )
        status, found = server.ask("/predict", body, kind)
        assert (status, [*found]) == (200, ["predictions"])
        pairs = zip(found["predictions"], expected[number % len(files)], strict=True)
        assert all(mine.keys() == theirs.keys() for mine, theirs in pairs)
        pairs = zip(found["predictions"], expected[number % len(files)], strict=True)
        return max(abs(mine["probability"] - theirs["probability"]) for mine, theirs in pairs)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(requests // 2)))
        before, begin = server.memory(), time.monotonic()
        differences = list(pool.map(one, range(requests)))
    record_property("requests per second", requests / (time.monotonic() - begin))
    record_property("MB", (before, server.memory()))
    assert max(differences) <= 1e-6  # a batch of other images is added up in another order
    assert server.memory() < 1.2 * before + 50


def test_info_says_what_answers(server: Server, place: Path) -> None:
    status, info = server.ask("/info")
    assert (status, info["model"]["run"], len(info["model"]["classes"])) == (200, "digits", 10)
    assert info["model"]["preprocessing"]["img_size"] == 16
    assert server.ask("/nothing") == (404, {"detail": "Not Found"})
    with pytest.raises(UserError, match=f"in use .*{server.port}.*; name another with --port"):
        verb.serve([f"{place}/logs/digits", f"--port={server.port}"], Program())


ROWS = "return [...document.querySelectorAll('li')].map((row) => row.textContent)"
SAID = "return document.querySelector('[role=status]').textContent"
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_shows_what_a_dropped_image_is(
    width: int, server: Server, place: Path, tmp_path: Path
) -> None:
    image = next((place / "data/digits/val").glob("*/*.png"))
    answer = server.ask("/predict", image.read_bytes())[1]
    expected = [f"{row['class']} {100 * row['probability']:.1f} %" for row in answer["predictions"]]
    (text := tmp_path / "text.png").write_text("no image")
    with chromium.started(tmp_path / "browser", width) as browser:
        browser.get(f"http://127.0.0.1:{server.port}/")
        for path, shown in ((image, expected), (text, [])):
            chromium.drop(browser, path)
            until = time.monotonic() + LIMIT
            while browser.execute_script(ROWS) != shown or browser.execute_script(SAID) == "…":
                assert time.monotonic() < until, browser.execute_script(ROWS)
            assert browser.execute_script(OVERFLOW) == 0
        assert (
            browser.execute_script(SAID) == server.ask("/predict", text.read_bytes())[1]["detail"]
        )
        assert browser.title == "digits: 10 classes"


def test_too_many_at_a_time_are_told_to_come_again(server: Server) -> None:
    # more than there are places for: one may be refused while `ask` has a place
    waiting = [server.half_sent(b"1234") for _ in range(80)]
    end = time.monotonic() + 10
    answer = server.ask("/predict", b"1234")
    while answer[0] != 503 and time.monotonic() < end:  # until it has begun to read all of them
        answer = server.ask("/predict", b"1234")
    assert answer == (503, {"detail": "too many requests at a time"})
    for connection in waiting:
        connection.close()
    while server.ask("/predict", b"1234")[0] == 503:  # until it has seen that they are gone
        time.sleep(0.1)


@pytest.mark.slow
def test_what_is_in_flight_is_answered_before_it_stops(server: Server, place: Path) -> None:
    image = next((place / "data/digits/val").glob("*/*.png")).read_bytes()
    own = begun(place, "--top_k=2")
    waiting = [own.half_sent(image) for _ in range(16)]
    own.ask("/info")  # connections are taken in their order
    own.process.send_signal(signal.SIGTERM)
    for connection in waiting:
        connection.sendall(image[-1:])
        answer = b"".join(iter(lambda connection=connection: connection.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(body)["predictions"]) == 2
        connection.close()
    output, _ = own.process.communicate(timeout=LIMIT)
    assert (own.process.returncode, "Traceback" in output) == (0, False), output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port=80"], "--port must be from 1024 to 65535, got 80"),
        (["--top_k=0"], "--top_k must be at least 1, got 0"),
        ([], r"cait serve needs LitServe: \.venv/bin/pip install --editable '\.\[serve\]'"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=words):
        verb.serve(["digits", *arguments], Program())

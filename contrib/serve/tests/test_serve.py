"""The server under good and bad requests from many clients, and when it is told to stop."""

import base64
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest
import torch
from encoded_image import encoded
from harness import LIMIT, free_port, slow, start
from PIL import Image

import cait as package
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

    def ask(self, path, body=None, kind="image/png"):
        """(status, what the JSON says) of a GET, or of a POST with a body."""
        address = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(address, body, {"Content-Type": kind})
        try:
            answer = urllib.request.urlopen(request, timeout=LIMIT)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, json.load(answer)

    def half_sent(self, image):
        """A connection on which the last byte of an image is missing."""
        head = f"POST /predict HTTP/1.1\r\nHost: h\r\nContent-Length: {len(image)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        connection.sendall(head.encode() + image[:-1])
        return connection

    def memory(self):
        """MB that its processes hold alone."""
        main = psutil.Process(self.process.pid)
        processes = [main, *main.children(recursive=True)]
        return sum(process.memory_full_info().uss for process in processes) / 1e6


def begun(folder, *options):
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


def test_an_image_without_finite_answers_costs_the_others_nothing():
    module = torch.nn.Module()
    module.class_names = ["a", "b"]
    module.device = torch.device("cpu")
    module.task = OneClass(2)
    module.transform = lambda image: torch.tensor(json.load(image))
    module.predict_step = lambda batch, _: batch[0]
    classifier = Classifier(lambda: module, None)
    classifier.module = module
    images = [b"[0.1, 0.9]", b"[NaN, NaN]", b"[0.8, 0.2]", b"?"]
    first, not_finite, last, unprepared = classifier.predict(images)
    assert (first[0]["class"], last[0]["class"]) == ("b", "a")
    assert classifier.encode_response(not_finite).status_code == 422
    assert classifier.encode_response(unprepared).status_code == 422
    assert "JSONDecodeError" in str(unprepared)  # by a transform of one's own


@pytest.fixture(scope="module")
def server(place, trained):
    shutil.copytree(trained, place / "logs/digits")
    server = begun(place)
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=LIMIT)


@pytest.fixture
def image(place):
    return next((place / "data/digits/val").glob("*/*.png"))


def bad_requests():
    """Status, body and type of requests without a whole image."""
    return [
        (400, b"", "image/png"),
        (422, b"a text", "text/plain"),
        (413, bytes(30_000_000), "image/png"),
        (422, encoded(Image.new("L", (20_000, 20_000)), "PNG"), "image/png"),
        (422, encoded(Image.effect_noise((64, 64), 50))[:900], "image/jpeg"),
        (415, b"--x", "multipart/form-data; boundary=x"),
        (400, b'{"picture": "?"', "application/json"),
        (400, b'{"image": "no base64"}', "application/json"),
        (422, b'{"image": "bm8gaW1hZ2U="}', "application/json"),
    ]


@pytest.mark.parametrize(("requests", "clients"), [(160, 8), *slow((2000, 16))])
def test_good_requests_get_the_classes_and_each_bad_one_a_line(server, place, requests, clients):
    bad = bad_requests()
    files = sorted((place / "data/digits/val").glob("*/*.png"))
    expected = package.load(place / "logs/digits").predict([str(file) for file in files])

    def ask(number):
        """Ask once; every tenth request is bad."""
        if number % 10 == 9:
            status, *request = bad[number // 10 % len(bad)]
            answer, content = server.ask("/predict", *request)
            assert (answer, [*content]) == (status, ["detail"])
            assert content["detail"].isprintable()
            return
        body = files[number % len(files)].read_bytes()
        kind = "image/png"
        if number % 3 == 0:
            kind = "Application/JSON"
            body = json.dumps({"image": base64.b64encode(body).decode()}).encode()
        status, content = server.ask("/predict", body, kind)
        assert (status, [*content]) == (200, ["predictions"])
        predicted = expected[number % len(files)]
        for mine, theirs in zip(content["predictions"], predicted, strict=True):
            assert mine.keys() == theirs.keys()
            # a batch of other images is added up in another order
            assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-6)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(requests // 2)))
        before = server.memory()
        list(pool.map(ask, range(requests)))
    assert server.memory() < 1.2 * before + 50


def test_info_says_what_answers(server, place):
    model = server.ask("/info")[1]["model"]
    assert (model["run"], len(model["classes"])) == ("digits", 10)
    assert model["preprocessing"]["img_size"] == 16
    assert server.ask("/nothing") == (404, {"detail": "Not Found"})
    with pytest.raises(UserError, match="--port"):
        verb.serve([f"{place}/logs/digits", f"--port={server.port}"], Program())


PAGE = """
const status = document.querySelector("[role=status]").textContent;
const rows = [...document.querySelectorAll("li")].map((row) => row.textContent);
const { scrollWidth, clientWidth } = document.documentElement;
return { status, rows, title: document.title, overflow: scrollWidth - clientWidth };
"""


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_shows_what_a_dropped_image_is(width, server, image, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("no image")
    best = server.ask("/predict", image.read_bytes())[1]["predictions"]
    rows = [f"{one['class']} {100 * one['probability']:.1f} %" for one in best]
    error = server.ask("/predict", text.read_bytes())[1]["detail"]
    with chromium.started(tmp_path / "browser", width) as browser:
        browser.get(f"http://127.0.0.1:{server.port}/")
        for file, shown in ((image, rows), (text, [])):
            chromium.drop(browser, file)
            until = time.monotonic() + LIMIT
            page = browser.execute_script(PAGE)
            while page["rows"] != shown or page["status"] == "…":
                assert time.monotonic() < until, page
                page = browser.execute_script(PAGE)
            assert page["overflow"] == 0
    assert (page["status"], page["title"]) == (error, "digits: 10 classes")


def test_too_many_at_a_time_are_told_to_come_again(server):
    # more than there are places for: one may be refused while `ask` has a place
    waiting = [server.half_sent(b"1234") for _ in range(80)]
    end = time.monotonic() + 10
    answer = (0, {})
    while answer[0] != 503 and time.monotonic() < end:  # until it has begun to read all of them
        answer = server.ask("/predict", b"1234")
    assert answer == (503, {"detail": "too many requests at a time"})
    for connection in waiting:
        connection.close()
    while server.ask("/predict", b"1234")[0] == 503:  # until it has seen that they are gone
        time.sleep(0.1)


@pytest.mark.slow
def test_what_is_in_flight_is_answered_before_it_stops(server, place, image):
    content = image.read_bytes()
    second = begun(place, "--top_k=2")
    waiting = [second.half_sent(content) for _ in range(16)]
    second.ask("/info")  # connections are taken in their order
    second.process.send_signal(signal.SIGTERM)
    for connection in waiting:
        connection.sendall(content[-1:])
    for connection in waiting:
        with connection, connection.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(body)["predictions"]) == 2
    output, _ = second.process.communicate(timeout=LIMIT)
    assert second.process.returncode == 0, output
    assert "Traceback" not in output

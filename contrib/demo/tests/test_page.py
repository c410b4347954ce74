"""The page of `cait demo` in a real browser: it answers what `cait predict` does, and asks nobody else."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import SMALL, call, ended
from PIL import Image

import cait as package
from contrib.demo import verb
from contrib.tests import chromium

TEXTS = "return ['status', 'error'].map((id) => document.getElementById(id).textContent)"
ANSWERED = """
const error = document.getElementById("error");
return document.body.dataset.done || (error.hidden ? "" : `error: ${error.textContent}`);
"""
SHOWN = """
return [...document.querySelectorAll("#best li")].map(({ dataset }) => [+dataset.index, +dataset.probability]);
"""
HIDDEN = "return document.getElementById(arguments[0]).hidden"
ORIGINS = """
const addresses = performance.getEntriesByType("resource").map((entry) => new URL(entry.name).origin);
return [...new Set(addresses)].filter((origin) => origin !== "null");
"""


class Page:
    """The page in a browser."""

    def __init__(self, browser, address):
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser = browser
        self.run = browser.execute_script
        self.wait = WebDriverWait(browser, 300, 0.05)
        browser.get(address)
        self.wait.until(lambda _: self.run(TEXTS)[0] == "Ready." or self.run(TEXTS)[1])
        assert self.run(TEXTS) == ["Ready.", ""]

    def click(self, selector, number=0):
        self.run("document.body.removeAttribute('data-done')")
        self.browser.find_elements("css selector", selector)[number].click()

    def drop(self, path):
        self.run("document.body.removeAttribute('data-done')")
        chromium.drop(self.browser, path)

    def answer(self):
        """The name of the image that it has answered, or its error."""
        return self.wait.until(lambda _: self.run(ANSWERED))

    def probabilities(self):
        return dict(self.run(SHOWN))

    def hidden(self, name):
        return self.run(HIDDEN, name)


@pytest.fixture
def browser(tmp_path):
    if not shutil.which("npm"):
        pytest.skip("npm fetches onnxruntime-web")
    with chromium.started(tmp_path / "browser") as browser:
        yield browser


@pytest.fixture
def served(place):
    """Address of the files of the folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_page_opened_as_a_file_says_how_to_open_it(tmp_path):
    with chromium.started(tmp_path) as browser:
        browser.get((verb.PAGE / "index.html").as_uri())
        status, error = browser.execute_script(TEXTS)
    assert "run python3 -m http.server --bind 127.0.0.1 and open http://127.0.0.1:8000" in status
    assert error == ""


def save_odd(folder, photograph):
    """Images that a browser may read in another way than Pillow."""
    folder.mkdir()
    shades = np.linspace(0, 255, photograph.width).astype(np.uint8)
    clear = photograph.copy()
    clear.putalpha(Image.fromarray(np.tile(shades, (photograph.height, 1))))
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph.save(folder / "turned.jpg", quality=95, exif=exif)
    photograph.save(folder / "large.png")
    clear.save(folder / "clear.png")
    photograph.convert("P").save(folder / "palette.png")
    return sorted(folder.iterdir())


RUN = "--trainer.max_epochs=1 --data.crop_pct=0.9 --model.warmup_epochs=0"
"""A run of a moment, whose answers differ."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upright", "fit"), [("true", "crop"), ("false", "pad"), ("true", "squash")]
)
def test_the_page_gives_what_predict_gives(
    upright, fit, browser, served, here, tmp_path, photographs
):
    name = f"digits-{fit}"
    words = f"{RUN} --data.exif_orientation={upright} --data.fit={fit}"
    ended(here, name, [*SMALL, *words.split()])
    assert call(here, "demo", name).returncode == 0
    module = package.load(name)
    page = Page(browser, f"{served}/logs/{name}/demo/")

    def check(path):
        """The page shows the probabilities that the run predicts for the image."""
        shown = page.probabilities()
        predicted = {best["index"]: best["probability"] for best in module.predict(path)}
        assert next(iter(shown)) == next(iter(predicted))
        if str(path).endswith(".png"):
            assert shown == pytest.approx(predicted, abs=1e-3), path
        for index in shown.keys() & predicted.keys():  # of JPEG the browser has another decoder
            assert shown[index] == pytest.approx(predicted[index], abs=5e-3), path

    images = [next(Path(f"data/digits/val/{digit}").iterdir()) for digit in range(10)]
    for path in [*images, *save_odd(tmp_path / "odd", photographs[0])]:
        page.drop(path)
        assert page.answer() == path.name
        check(path)
    assert (page.hidden("map"), page.hidden("switch")) == (True, False)
    page.click("#saliency")
    assert not page.hidden("map")
    page.click("#sample-list button", 3)
    assert page.answer() == "True class 3"
    check(f"logs/{name}/demo/sample-images/3.png")

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    page.drop(broken)
    assert page.answer() == "error: broken.png is not an image that this browser can read."
    for part in ("photo", "map", "switch"):  # nothing of the last answer beside the error
        assert page.hidden(part)
    assert page.probabilities() == {}
    page.drop(images[3])  # and the next one is read
    assert page.answer() == images[3].name
    assert page.hidden("error")

    assert page.run(ORIGINS) == [served]
    levels = {entry["level"] for entry in browser.get_log("browser")}
    assert levels.isdisjoint({"SEVERE", "WARNING"})

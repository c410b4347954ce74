"""The page that runs a network in the browser: what is written, Pillow's resizing in JavaScript, and a browser."""

import functools
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from urllib.request import urlopen

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import yaml
from harness import SMALL, link_digits
from PIL import Image

import cait as package
from cait.cli import main
from cait.data.reading import load_image
from cait.data.transforms import INTERPOLATIONS, NormalizeAndErase, Preprocessing
from cait.errors import UserError
from cait.settings import values
from contrib.demo import verb, web_runtime
from contrib.tests import chromium

PIXELS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
JAVASCRIPT = """
import fs from "fs";
import { prepare, saliency } from "./resample.mjs";
const asked = JSON.parse(fs.readFileSync(0, "utf8"));
const images = asked.images.map(({ pixels, width, height, how }) => {
  const { input, seen } = prepare(Uint8ClampedArray.from(pixels), width, height, how);
  return { seen: [...seen], input: [...input] };
});
console.log(JSON.stringify({ images, saliency: [...saliency(asked.weights, 4, 32)] }));
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the digits and the checkpoints of runs that were never trained, of three channels and one."""
    place = tmp_path_factory.mktemp("demo")
    link_digits(place, digits_root)
    settings = {
        "root": str(digits_root),
        "img_size": 16,
        "crop_pct": 0.9,
        "exif_orientation": True,
        "background": "white",
    }
    for name, channels in (("few", 3), ("gray", 1)):
        fields = {
            "embed_dim": 32,
            "depth": 1,
            "num_heads": 2,
            "patch_size": 4,
            "in_chans": channels,
        }
        data = package.ImageNetDataModule(**settings, in_chans=channels)
        normal = {"mean": data.settings.mean, "std": data.settings.std}
        module = package.CaiTModule("xxs24", 16, 10, fields=fields, **normal)
        about = {
            "pytorch-lightning_version": "2.6.6",
            "global_step": 7,
            "epoch": 0,
            "state_dict": module.state_dict(),
        }
        about["hyper_parameters"] = dict(module.hparams)
        about["ImageNetDataModule"] = data.state_dict()
        folder = place / "logs" / name
        (folder / "checkpoints").mkdir(parents=True)
        torch.save(about, folder / "checkpoints/best.ckpt")
        (folder / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    return place


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The folder, with a run of a moment too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        how = ["--data.crop_pct=0.9", "--model.warmup_epochs=0"]
        main(["fit", *SMALL, "--trainer.max_epochs=1", "--run_name=digits", *how])
    return place


@pytest.mark.skipif(shutil.which("node") is None, reason="runs JavaScript in Node.js")
def test_javascript_resizes_as_pillow_does_to_the_bit(tmp_path: Path) -> None:
    shutil.copy(verb.PAGE / "resample.js", tmp_path / "resample.mjs")
    (tmp_path / "run.mjs").write_text(JAVASCRIPT)
    rng = np.random.default_rng(0)
    asked, expected = [], []
    for number, (filter, fit) in enumerate(product(INTERPOLATIONS * 2, ("crop", "pad", "squash"))):
        width, height = [(8, 8), (16, 24), (61, 40), (25, 24), (100, 7), (1, 30), (41, 40)][
            number % 7
        ]
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if number % 2:
            pixels = (pixels > 127).astype(np.uint8) * 255  # which overshoots
        reading = dict(shrink=[None, 4, 5][number % 3], in_chans=[3, 1, 3, 1, 1][number % 5])
        share = [1.0, 0.875, 0.9, 0.6][number % 4]
        normal = PIXELS if reading["in_chans"] == 3 else {"mean": [0.4], "std": [0.2]}
        size = [16, 15][number % 2]
        how = Preprocessing(
            img_size=size, interpolation=filter, crop_pct=share, fit=fit, **reading, **normal
        )
        opaque = np.dstack([pixels, np.full((height, width), 255, np.uint8)])
        asked.append(
            {
                "pixels": opaque.ravel().tolist(),
                "width": width,
                "height": height,
                "how": values(how),
            }
        )
        expected.append((how, how.transform()(load_image(Image.fromarray(pixels), reading=how))))
    weights = torch.rand(16)
    stdin = json.dumps({"images": asked, "weights": weights.tolist()})
    done = subprocess.run(
        ["node", "run.mjs"], cwd=tmp_path, input=stdin, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for got, (how, pixels) in zip(told["images"], expected, strict=True):
        side = pixels.shape[1]
        assert torch.equal(
            torch.tensor(got["seen"]).view(side, side, 4)[..., :3].permute(2, 0, 1), pixels
        )
        prepared = NormalizeAndErase(how.mean, how.std)(pixels.permute(1, 2, 0)[None])[0]
        assert torch.allclose(torch.tensor(got["input"]).view_as(prepared), prepared, atol=1e-6)
    scaled = (weights - weights.min()) / (weights.max() - weights.min())
    resized = F.interpolate(
        scaled.view(1, 1, 4, 4), size=(32, 32), mode="bicubic", align_corners=False
    )
    assert torch.allclose(
        torch.tensor(told["saliency"]).view(32, 32), resized[0, 0].clamp(0, 1), atol=1e-5
    )


def runtime_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with small files, whose integrity counts as the right one."""
    contents = {name: name.encode() for name in web_runtime.FILES}
    dist = folder / "package/dist"
    dist.mkdir(parents=True)
    for name, content in contents.items():
        (dist / name).write_bytes(content)
        digest = b64encode(hashlib.sha512(content).digest()).decode()
        monkeypatch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
    with tarfile.open(folder / web_runtime.TARBALL, "w:gz") as tar:
        tar.add(folder / "package", "package")
    return folder / web_runtime.TARBALL


def test_the_folder_holds_all_that_the_page_needs(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = runtime_of_ones_own(tmp_path, monkeypatch)
    main(["demo", "few", "--runtime", str(runtime)])
    told = capsys.readouterr().out
    folder = Path("logs/few/demo")
    server = f"python -m http.server --bind 127.0.0.1 --directory {folder}"
    assert told.splitlines()[-2:] == [
        f"open http://127.0.0.1:8000 after: {server}",
        str(folder / "index.html"),
    ]
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in verb.PAGE.iterdir()), *web_runtime.FILES, "model.onnx", "model.json", "sample-images",
    }  # fmt: skip
    about = json.loads((folder / "model.json").read_text())
    assert about["class_names"] == [str(digit) for digit in range(10)]
    how = about["preprocessing"]
    assert (how["img_size"], how["crop_pct"], how["interpolation"], how["background"]) == (
        16,
        0.9,
        "bicubic",
        "#ffffff",
    )
    assert "10 validation images are copied into the page; --samples 0 copies none" in told
    assert about["samples"] == [
        {"file": f"sample-images/{digit}.png", "name": str(digit)} for digit in range(10)
    ]
    facts = dict(about["facts"])
    assert facts["Model"].startswith("CaiT 1×32, 0.0 million parameters")
    assert facts["Weights"] == f"{(folder / 'model.onnx').stat().st_size / 1e6:.1f} MB, 32 bits"

    assert str(Path(verb.__file__).parents[2]).encode() not in (folder / "model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert (
        json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
        == about["class_names"]
    )
    module = package.load("few")
    image = module.transform("data/digits/val/3/0045.png")
    logits, saliency = map(
        torch.from_numpy, session.run(["logits", "saliency"], {"images": image[None].numpy()})
    )
    with torch.no_grad():
        expected = module.model(image[None])
        # [1, h, T, T + s²], the class token first
        maps = module.model.maps(image[None]).class_attention[0]
    assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.allclose(saliency[0], maps[0, :, 0, -16:].mean(dim=0).view(4, 4), atol=1e-5)


class Links(HTMLParser):
    """The addresses that a page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def test_the_page_has_all_that_it_asks_for(
    here: Path,
    served: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runtime = runtime_of_ones_own(tmp_path, monkeypatch)
    main(["demo", "few", "--runtime", str(runtime), "--output", "my space"])
    folder = Path("my space")
    asked = ["index.html", *Links((folder / "index.html").read_text()).found]
    script = (folder / "app.js").read_text()
    asked += re.findall(r'(?:from |fetch\(|new URL\()"([^"]+)"', script)
    asked += [
        sample["file"] for sample in json.loads((folder / "model.json").read_text())["samples"]
    ]
    base = f"{served}/my%20space/"
    for name in asked:
        address = urljoin(base, name)
        assert address.startswith(base), name
        with urlopen(address) as answer:
            assert answer.status == 200
    ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert ours == {name.removeprefix("./") for name in asked}
    assert capsys.readouterr().out.splitlines()[-1] == "my space/index.html"


def test_a_page_of_one_channel(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(
        [
            "demo",
            "gray",
            "--runtime",
            str(runtime_of_ones_own(tmp_path, monkeypatch)),
            "--samples",
            "0",
        ]
    )
    how = json.loads(Path("logs/gray/demo/model.json").read_text())["preprocessing"]
    assert (how["in_chans"], how["mean"], how["std"]) == (1, [0.458971], [0.225609])
    module = package.load("gray")
    image = module.transform("data/digits/val/3/0045.png")[None]
    logits = onnxruntime.InferenceSession("logs/gray/demo/model.onnx").run(
        ["logits"], {"images": image.numpy()}
    )[0]
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(logits), module.model(image), atol=1e-4)


@pytest.mark.slow
def test_the_copied_images_are_small_and_say_nothing_but_their_class(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = str(runtime_of_ones_own(tmp_path, monkeypatch))
    for number, name in enumerate(("a", "b", "c")):
        place = tmp_path / "photos/val" / name
        place.mkdir(parents=True)
        exif = Image.Exif()
        exif[0x010E] = "where it was taken"
        Image.new("RGB", (400, 200 + number), (80 * number, 0, 0)).save(place / "1.jpg", exif=exif)
        shutil.copytree(place, tmp_path / "photos/train" / name)
        (place / "0.jpg").write_text("no image")
    how = [
        f"--data.root={tmp_path / 'photos'}",
        "--data.num_workers=0",
        "--data.batch_size=2",
        "--run_name=photos",
    ]
    how += ["--data.max_bad_share=0.9", "--trainer.max_steps=1", "--trainer.devices=1"]
    main(["fit", *SMALL, *how])
    folder = Path("logs/photos/demo")

    main(["demo", "photos", "--runtime", runtime, "--samples", "2"])
    (folder / "README.md").write_text("mine")
    about = json.loads((folder / "model.json").read_text())
    assert about["samples"] == [
        {"file": f"sample-images/{index}.png", "name": "ab"[index]} for index in (0, 1)
    ]
    for index in (0, 1):
        with Image.open(folder / f"sample-images/{index}.png") as copy:
            assert min(copy.size) == about["preprocessing"]["img_size"]
            assert copy.info == dict(copy.getexif()) == {}
            assert abs(copy.getpixel((0, 0))[0] - 80 * index) <= 3

    main(["demo", "photos", "--runtime", runtime, "--samples", "0"])
    assert (folder / "README.md").read_text() == "mine"
    assert json.loads((folder / "model.json").read_text())["samples"] == []
    assert not (folder / "sample-images").exists()
    capsys.readouterr()
    shutil.rmtree(tmp_path / "photos")
    main(["demo", "photos", "--runtime", runtime])
    assert capsys.readouterr().out.startswith("the page has no sample images: ")
    with pytest.raises(SystemExit):
        main(["demo", "photos", "--samples=-1"])
    assert "--samples must be at least 0, got -1" in capsys.readouterr().err


def test_another_runtime_is_refused_and_npm_need_not_be_there(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runtime_of_ones_own(tmp_path, monkeypatch).parent / "package"
    assert (
        web_runtime.files(folder)
        == web_runtime.files(folder / "dist")
        == web_runtime.files(folder.parent / web_runtime.TARBALL)
    )
    (folder / "dist" / next(iter(web_runtime.FILES))).write_bytes(b"something else")
    with pytest.raises(UserError, match="is not that of onnxruntime-web@"):
        web_runtime.files(folder)
    with pytest.raises(UserError, match="is not the package onnxruntime-web@"):
        web_runtime.files(here / "data")
    tarball = folder.parent / web_runtime.TARBALL
    for content in (tarball.read_bytes()[:-40], b"no archive"):
        tarball.write_bytes(content)
        with pytest.raises(UserError, match=f"is not the package {web_runtime.PACKAGE}: "):
            web_runtime.files(tarball)
    Path("site").mkdir()
    Path("site/index.html").write_text("mine")
    with pytest.raises(SystemExit):
        main(["demo", "few", "--output", "site"])
    assert "site holds another page" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stop:
        main(["demo", "few", "--output", "nowhere"])
    assert stop.value.code == 2
    assert f"there is no npm here, which fetches {web_runtime.PACKAGE}" in capsys.readouterr().err
    assert not Path("nowhere").exists()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if not (
        shutil.which("npm")
        or all((web_runtime._cache() / name).is_file() for name in web_runtime.FILES)
    ):
        pytest.skip("npm fetches onnxruntime-web")
    with chromium.started(tmp_path / "browser") as browser:
        yield browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(place: Path) -> Iterator[str]:
    """Address of the files of the folder."""
    handler = functools.partial(Quiet, directory=place)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


TOP = """
return [...document.querySelectorAll("#best li")].map(({ dataset }) => [+dataset.index, +dataset.probability]);
"""


STATUS = "return ['status', 'error'].map((id) => document.getElementById(id).textContent)"
SETTLED = f"const [status, error] = (() => {{ {STATUS} }})(); return status === 'Ready.' || error"
DONE = "return document.body.dataset.done || !document.getElementById('error').hidden"


class Page:
    """The demo in a browser."""

    def __init__(self, browser: Any, address: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser, self.wait = browser, WebDriverWait(browser, 300, 0.05)
        browser.get(address)
        self.wait.until(lambda page: page.execute_script(SETTLED))
        assert browser.execute_script(STATUS) == ["Ready.", ""]

    def drop(self, path: Path) -> dict[int, float]:
        """Drop an image; returns the probabilities by class."""
        self.browser.execute_script("document.body.removeAttribute('data-done')")
        chromium.drop(self.browser, path)
        self.wait.until(lambda page: page.execute_script(DONE))
        assert self.script("document.body.dataset.done") == path.name, self.browser.execute_script(
            STATUS
        )
        return {int(index): probability for index, probability in self.browser.execute_script(TOP)}

    def script(self, code: str) -> Any:
        return self.browser.execute_script(f"return {code}")


def test_a_page_opened_as_a_file_says_how_to_open_it(tmp_path: Path) -> None:
    with chromium.started(tmp_path) as browser:
        browser.get((verb.PAGE / "index.html").as_uri())
        status, error = browser.execute_script(STATUS)
    assert status == (
        "A browser cannot run this page from a file. "
        "In its folder run python3 -m http.server --bind 127.0.0.1 and open http://127.0.0.1:8000"
    )
    assert error == ""


def odd_files(folder: Path, photograph: Image.Image) -> dict[str, Path]:
    """Images that a browser may read in another way than Pillow."""
    folder.mkdir()
    paths = {
        name: folder / name
        for name in ("large.png", "clear.png", "turned.jpg", "gray.png", "palette.png")
    }
    photograph.save(paths["large.png"])
    veil = Image.fromarray(
        np.tile(np.linspace(0, 255, photograph.width).astype(np.uint8), (photograph.height, 1))
    )
    clear = photograph.copy()
    clear.putalpha(veil)
    clear.save(paths["clear.png"])
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph.save(paths["turned.jpg"], quality=95, exif=exif)
    photograph.convert("L").save(paths["gray.png"])
    photograph.convert("P").save(paths["palette.png"])
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(("upright", "fit"), [(True, "crop"), (False, "pad"), (True, "squash")])
def test_the_page_gives_what_predict_gives(
    upright: bool,
    fit: str,
    browser: Any,
    served: str,
    here: Path,
    trained: Path,
    tmp_path: Path,
    photographs: list[Image.Image],
    capsys: Any,
) -> None:
    settings = Path("logs/digits/config.yaml")
    before = settings.read_text()
    changed = before.replace("exif_orientation: true", f"exif_orientation: {json.dumps(upright)}")
    settings.write_text(changed.replace("fit: crop", f"fit: {fit}"))
    try:
        main(["demo", "digits"])
        module = package.load("digits")
    finally:
        settings.write_text(before)
    assert module.reading.exif_orientation == upright
    expected = Preprocessing(img_size=16, crop_pct=0.9, fit=fit).transform()(photographs[0])
    assert torch.equal(module.eval_transform(photographs[0]), expected)
    page = Page(browser, f"{served}/logs/digits/demo/")
    digits = [next(Path(f"data/digits/val/{digit}").iterdir()) for digit in range(10)]
    odd = odd_files(tmp_path / "odd", photographs[0])
    worst = 0.0
    for path in [*digits, *odd.values()]:
        shown = page.drop(path)
        expected = {best["index"]: best["probability"] for best in module.predict(path)}
        assert next(iter(shown)) == next(iter(expected))
        differences = [
            abs(probability - expected[index])
            for index, probability in shown.items()
            if index in expected
        ]
        assert len(differences) == 5 or path.suffix != ".png"
        # another release of libjpeg may be in the browser
        limit = 1e-3 if path.suffix == ".png" else 5e-3
        assert max(differences) <= limit, path
        worst = max(worst, *differences)
    assert page.script(
        "document.getElementById('map').hidden && !document.getElementById('switch').hidden"
    )
    page.browser.find_element("id", "saliency").click()
    assert page.script("!document.getElementById('map').hidden")
    page.script("document.body.removeAttribute('data-done')")
    samples = page.browser.find_elements("css selector", "#sample-list button")
    assert len(samples) == 10
    samples[3].click()
    page.wait.until(lambda _: page.script(f"(() => {{ {DONE} }})()"))
    assert page.script("document.body.dataset.done") == "True class 3"
    shown = {int(index): probability for index, probability in page.browser.execute_script(TOP)}
    expected = {
        best["index"]: best["probability"]
        for best in module.predict("logs/digits/demo/sample-images/3.png")
    }
    assert shown == pytest.approx(expected, abs=1e-3)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    chromium.drop(page.browser, broken)
    page.wait.until(lambda _: page.script("document.getElementById('error').textContent"))
    assert page.script("document.getElementById('error').textContent") == (
        "broken.png is not an image that this browser can read."
    )
    for left in ("photo", "map", "switch"):  # nothing of the last answer beside the error
        assert page.script(f"document.getElementById('{left}').hidden")
    assert page.script("document.getElementById('best').children.length") == 0
    assert page.drop(digits[3])  # and the next one is read
    assert page.script("document.getElementById('error').hidden")
    origins = page.script(
        "[...new Set(performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin))]"
    )
    assert [origin for origin in origins if origin != "null"] == [served]
    assert [
        entry
        for entry in page.browser.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ] == []

"""The page that runs a network in the browser: what is written, Pillow's resizing in JavaScript, and a browser."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import yaml
from harness import SMALL, call, ended
from PIL import Image

import cait as package
from cait.data.reading import load_image
from cait.data.transforms import NormalizeAndErase, Preprocessing
from cait.errors import UserError
from cait.settings import values
from contrib.demo import verb, web_runtime

HERE = Path(__file__).parent
PIXELS = {
    1: {"mean": [0.4], "std": [0.2]},
    3: {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}


def by_javascript(folder, images, weights):
    """What the page's code makes of images, and of the weights of a map."""
    shutil.copy(verb.PAGE / "resample.js", folder / "page.mjs")
    shutil.copy(HERE / "resample.mjs", folder)
    stdin = json.dumps({"images": images, "weights": weights.tolist()})
    command = ["node", "resample.mjs"]
    return json.loads(subprocess.check_output(command, cwd=folder, input=stdin, text=True))


@pytest.mark.skipif(shutil.which("node") is None, reason="runs JavaScript in Node.js")
def test_javascript_resizes_as_pillow_does_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    images, expected = [], []
    for number, row in enumerate(yaml.safe_load((HERE / "resample.yaml").read_text())):
        size = {"width": row.pop("width"), "height": row.pop("height")}
        how = Preprocessing(**row, **PIXELS[row["in_chans"]])
        pixels = rng.integers(0, 256, (size["height"], size["width"], 3), dtype=np.uint8)
        if number % 2:
            pixels = pixels // 128 * 255
        image = Image.fromarray(pixels)
        opaque = np.asarray(image.convert("RGBA")).ravel()
        images.append({"pixels": opaque.tolist(), "how": values(how), **size})
        expected.append((how, how.transform()(load_image(image, reading=how))))
    weights = torch.rand(16)
    answer = by_javascript(tmp_path, images, weights)
    for got, (how, pixels) in zip(answer["images"], expected, strict=True):
        seen = torch.tensor(got["seen"]).view(*pixels.shape[1:], 4)[..., :3]
        assert torch.equal(seen.permute(2, 0, 1), pixels)
        prepared = NormalizeAndErase(how.mean, how.std)(pixels.permute(1, 2, 0)[None])[0]
        assert torch.allclose(torch.tensor(got["input"]), prepared.flatten(), atol=1e-6)
    scaled = (weights - weights.min()) / (weights.max() - weights.min())
    resized = F.interpolate(scaled.view(1, 1, 4, 4), size=(32, 32), mode="bicubic")
    saliency = torch.tensor(answer["saliency"])
    assert torch.allclose(saliency, resized.clamp(0, 1).flatten(), atol=1e-5)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """A package of onnxruntime-web with small files, whose integrity counts as the right one."""
    package = tmp_path_factory.mktemp("npm") / "package"
    (package / "dist").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in web_runtime.FILES:
            (package / "dist" / name).write_text(name)
            digest = b64encode(hashlib.sha512(name.encode()).digest()).decode()
            patch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
        archive = shutil.make_archive(str(package), "gztar", package.parent, "package")
        yield Path(archive)


def test_the_runtime_is_read_from_its_archive_or_folder(runtime, tmp_path):
    contents = web_runtime.files(runtime)
    assert contents == {name: name.encode() for name in web_runtime.FILES}
    folder = runtime.parent / "package"
    assert web_runtime.files(folder) == web_runtime.files(folder / "dist") == contents
    (tmp_path / "cut.tgz").write_bytes(runtime.read_bytes()[:-40])
    with pytest.raises(UserError, match=web_runtime.PACKAGE):
        web_runtime.files(tmp_path / "cut.tgz")


GRAY = "--data.crop_pct=0.9 --data.fit=pad --model.fields.in_chans=1"


@pytest.fixture(scope="module")
def pages(place, trained, runtime):
    """What `cait demo` prints of a run of three channels, and of one whose images are prepared in ways of its own."""
    shutil.copytree(trained, place / "logs/colors")
    ended(place, "gray", [*SMALL, *GRAY.split(), "--data.num_workers=0", "--trainer.max_steps=1"])
    colors = call(place, "demo", "colors", f"--runtime={runtime}", "--output=my space")
    gray = call(place, "demo", "gray", f"--runtime={runtime}", "--samples=0")
    return {"colors": colors.stdout.splitlines(), "gray": gray.stdout.splitlines()}


RUNS = pytest.mark.parametrize(
    ("run", "folder", "samples"), [("colors", "my space", 10), ("gray", "logs/gray/demo", 0)]
)


@RUNS
def test_the_folder_holds_what_the_page_asks_for_and_nothing_more(
    run, folder, samples, here, pages
):
    *copied, how_to_open, page = pages[run]
    server = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(folder)}"
    assert how_to_open == f"open http://127.0.0.1:8000 after: {server}"
    assert page == f"{folder}/index.html"
    line = "10 validation images are copied into the page; --samples 0 copies none"
    assert copied == [line][:samples]

    asked = ["index.html", *(f"sample-images/{digit}.png" for digit in range(samples))]
    asked += re.findall(r'\b(?:href|src)="([^"]+)"', Path(page).read_text())
    script = Path(folder, "app.js").read_text()
    asked += re.findall(r'(?:from |fetch\(|new URL\()"([^"]+)"', script)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert {*files} == {Path(folder, name) for name in asked}


@RUNS
@pytest.mark.usefixtures("here", "pages")
def test_the_page_knows_the_network(run, folder, samples):
    module = package.load(run)
    about = json.loads(Path(folder, "model.json").read_text())
    assert about["class_names"] == [str(digit) for digit in range(10)]
    assert module.preprocessing["background"] == "white"
    assert about["preprocessing"] == module.preprocessing | {"background": "#ffffff"}
    names = [str(digit) for digit in range(samples)]
    assert about["samples"] == [
        {"file": f"sample-images/{name}.png", "name": name} for name in names
    ]
    facts = dict(about["facts"])
    assert ("Accuracy" in facts) == (run == "colors")  # the other was not scored
    assert facts["Model"] == "CaiT 2×32, 0.1 million parameters"
    network = Path(folder, "model.onnx").read_bytes()
    assert facts["Weights"] == f"{len(network) / 1e6:.1f} MB, 32 bits"

    session = onnxruntime.InferenceSession(network)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == about["class_names"]
    assert str(HERE.parents[2]).encode() not in network  # nothing of this machine
    image = module.transform("data/digits/val/3/0045.png")[None]
    outputs = session.run(["logits", "saliency"], {"images": image.numpy()})
    logits, saliency = map(torch.from_numpy, outputs)
    with torch.no_grad():
        assert torch.allclose(logits, module.model(image), atol=1e-4)
        maps = module.model.maps(image).class_attention[0]  # [1, h, 1, 1 + 16]
    expected = maps[:, :, 0, -16:].mean(dim=1).view(1, 4, 4)
    assert torch.allclose(saliency, expected, atol=1e-5)


@pytest.mark.slow
def test_the_copied_images_are_small_and_say_nothing_but_their_class(here, tmp_path, runtime):
    exif = Image.Exif()
    exif[0x010E] = "where it was taken"
    for number, name in enumerate("abc"):
        folder = tmp_path / "photos/val" / name
        folder.mkdir(parents=True)
        image = Image.new("RGB", (400, 200 + number), (80 * number, 0, 0))
        image.save(folder / "1.jpg", exif=exif)
        (folder / "0.jpg").write_text("no image")
    shutil.copytree(tmp_path / "photos/val", tmp_path / "photos/train")
    words = [f"--data.root={tmp_path}/photos", "--data.num_workers=0", "--data.batch_size=2"]
    ended(here, "photos", [*SMALL, *words, "--data.max_bad_share=0.9", "--trainer.max_steps=1"])
    folder = here / "logs/photos/demo"
    demo = ["demo", "photos", f"--runtime={runtime}"]

    call(here, *demo, "--samples=2")
    (folder / "README.md").write_text("mine")
    about = json.loads((folder / "model.json").read_text())
    assert [sample["name"] for sample in about["samples"]] == ["a", "b"]
    for index, sample in enumerate(about["samples"]):
        with Image.open(folder / sample["file"]) as copy:
            assert min(copy.size) == about["preprocessing"]["img_size"]
            assert copy.info == dict(copy.getexif()) == {}
            assert abs(copy.getpixel((0, 0))[0] - 80 * index) <= 3

    call(here, *demo, "--samples=0")
    assert (folder / "README.md").read_text() == "mine"
    assert json.loads((folder / "model.json").read_text())["samples"] == []
    assert not (folder / "sample-images").exists()
    shutil.rmtree(tmp_path / "photos")
    assert call(here, *demo).stdout.startswith("the page has no sample images: ")

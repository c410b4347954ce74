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
from harness import SMALL, TWO_BLOCKS, call, ended, parsed, works
from PIL import Image

import cait as package
from cait.data.reading import load_image
from cait.data.transforms import NormalizeAndErase, Preprocessing
from cait.errors import UserError
from cait.settings import values
from contrib.demo import verb, web_runtime

HERE = Path(__file__).parent


def by_javascript(folder, images, weights):
    """What the page's code makes of images, and of the weights of a map."""
    shutil.copy(verb.PAGE / "resample.js", folder / "page.mjs")
    shutil.copy(HERE / "resample.mjs", folder)
    stdin = json.dumps({"images": images, "weights": weights.tolist()})
    return json.loads(
        subprocess.check_output(["node", "resample.mjs"], cwd=folder, input=stdin, text=True)
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="runs JavaScript in Node.js")
def test_javascript_resizes_as_pillow_does_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    images = []
    expected = []
    table = parsed(HERE / "resample.yaml")
    for number, row in enumerate(table["images"]):
        width, height = row.pop("size")
        how = Preprocessing(**row)
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        if number % 2:
            image = image.point(lambda value: value // 128 * 255)
        opaque = [*image.convert("RGBA").tobytes()]
        images.append({"pixels": opaque, "how": values(how), "width": width, "height": height})
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
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package/dist").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in web_runtime.FILES:
            (folder / "package/dist" / name).write_text(name)
            digest = b64encode(hashlib.sha512(name.encode()).digest()).decode()
            patch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
        yield Path(shutil.make_archive(str(folder / "npm"), "gztar", folder, "package"))


def test_the_runtime_is_read_from_its_archive_or_folder(runtime, tmp_path):
    contents = web_runtime.files(runtime)
    for place in ("package", "package/dist"):
        assert web_runtime.files(runtime.parent / place) == contents
    (tmp_path / "cut.tgz").write_bytes(runtime.read_bytes()[:-40])
    with pytest.raises(UserError, match=web_runtime.PACKAGE):
        web_runtime.files(tmp_path / "cut.tgz")


GRAY = """
    --data.crop_pct=0.9 --data.fit=pad --model.fields.in_chans=1
    --data.num_workers=0 --trainer.max_steps=1
"""


@pytest.fixture(scope="module")
def pages(place, trained, runtime):
    """What `cait demo` prints of a run of three channels, and of one whose images are prepared in ways of its own."""
    shutil.copytree(trained, place / "logs/colors")
    ended(place, "gray", [*SMALL, TWO_BLOCKS, *GRAY.split()])
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
    about = parsed(Path(folder, "model.json"))
    assert about["class_names"] == [str(digit) for digit in range(10)]
    assert about["preprocessing"] == module.preprocessing | {"background": "#ffffff"}
    files = [f"sample-images/{digit}.png" for digit in range(samples)]
    assert [sample["file"] for sample in about["samples"]] == files
    facts = dict(about["facts"])
    assert ("Accuracy" in facts) == (run == "colors")  # the other was not scored
    assert facts["Model"] == "CaiT 2×32, 0.1 million parameters"
    network = Path(folder, "model.onnx").read_bytes()
    assert str(HERE.parents[2]).encode() not in network  # nothing of this machine

    image = module.transform("data/digits/val/3/0045.png")[None]
    session = onnxruntime.InferenceSession(network)
    logits, saliency = session.run(["logits", "saliency"], {"images": image.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, module.model(image), atol=1e-4)
        maps = module.model.maps(image).class_attention[0]  # [1, h, 1, 1 + 16]
    expected = maps[:, :, 0, -16:].mean(dim=1).view(1, 4, 4)
    np.testing.assert_allclose(saliency, expected, atol=1e-5)


@pytest.mark.slow
def test_the_copied_images_are_small_and_say_nothing_but_their_class(here, tmp_path, runtime):
    exif = Image.Exif()
    exif[0x010E] = "where it was taken"
    root = tmp_path / "photos"
    for number, name in enumerate(("val/a", "val/b", "train/a", "train/b")):
        (root / name).mkdir(parents=True)
        image = Image.new("RGB", (400, 200), (80 * (number % 2), number, 0))
        image.save(root / name / "1.jpg", exif=exif)
        (root / name / "0.jpg").write_text("no image")
    words = (
        "--data.num_workers=0 --data.batch_size=2 --data.max_bad_share=0.9 --trainer.max_steps=1"
    )
    ended(here, "photos", [*SMALL, *words.split(), f"--data.root={root}"])
    folder = here / "logs/photos/demo"
    demo = ["demo", "photos", f"--runtime={runtime}"]

    works(call(here, *demo))
    (folder / "README.md").write_text("mine")
    about = parsed(folder / "model.json")
    assert [sample["name"] for sample in about["samples"]] == ["a", "b"]
    for index, sample in enumerate(about["samples"]):
        with Image.open(folder / sample["file"]) as copy:
            assert min(copy.size) == about["preprocessing"]["img_size"]
            assert copy.info == {}
            assert abs(copy.getpixel((0, 0))[0] - 80 * index) <= 3

    works(call(here, *demo, "--samples=0"))
    assert (folder / "README.md").read_text() == "mine"
    assert parsed(folder / "model.json")["samples"] == []
    assert not (folder / "sample-images").exists()
    shutil.rmtree(root)
    assert call(here, *demo).stdout.startswith("the page has no sample images: ")

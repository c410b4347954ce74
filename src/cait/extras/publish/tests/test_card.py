"""The model card, and timm's files for the Hub beside it."""

import ast
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import yaml
from harness import call, save_mixed
from PIL import ExifTags, Image

from cait import ckpt
from cait.data.reading import Reading, load_image
from cait.extras.channels.preprocessing import Planes
from cait.extras.display import LANGUAGES, network_name, written
from cait.extras.publish import card as hub_card
from cait.plugins import Results
from cait.settings import group, values

USUAL, *CARDS = yaml.safe_load(Path(__file__).with_name("cards.yaml").read_text())


@pytest.fixture(scope="module")
def run(place, trained):
    shutil.copytree(trained, place / "logs/mine")


pytestmark = pytest.mark.usefixtures("run", "here")


def block(card, language):
    """The block of code in this language."""
    return re.search(rf"```{language}\n(.*?)\n```$", card, re.S | re.M)[1]


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_card_tells_what_the_run_has_written(here, weights):
    done = call(here, "card", "mine", f"--{weights}", "--license", "apache-2.0")
    assert done.stdout.split() == ["logs/mine/card/README.md", "logs/mine/card/curves.png"]
    Image.open("logs/mine/card/curves.png").verify()
    scores = json.loads(Path("logs/mine/evaluation.json").read_text())[weights]
    card = Path("logs/mine/card/README.md").read_text()
    data = huggingface_hub.ModelCard(card).data  # the Hub's own reader
    assert (data.library_name, data.license) == ("timm", "apache-2.0")
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type) == ("digits", "accuracy")
    assert result.metric_value == pytest.approx(scores["acc1"] / 100, abs=1e-4)
    assert f"| validation images | 360 | {scores['acc1']:.2f} % |" in card
    assert "- Data: digits, 1,437 training images\n- Checkpoint: step 6, epoch 1\n" in card
    model = yaml.safe_load(block(card, "yaml"))["model"]
    assert model["fields"]["embed_dim"] == 32
    assert f"classes: {network_name(model['name'], model['fields'])} for images" in card
    assert str(here) not in card  # nothing of this machine


def rendered(repo="me/own", tables=(), **differing):
    """A card, where something differs from the usual."""
    scores, about, model, data = (USUAL[name] | differing.get(name, {}) for name in USUAL)
    config = {"model": model, "data": data}
    return hub_card.text(repo, scores, about, config, "many", None, tables)


@pytest.mark.parametrize("case", CARDS, ids=lambda case: case["case"])
def test_the_card_says_what_a_reader_needs(case):
    tables = [Results(**table) for table in case.pop("tables", [])]
    lines = case.pop("lines")
    del case["case"]
    assert set(lines) <= {*rendered(**case, tables=tables).splitlines()}


def read_by_the_card(card, file, patch, config):
    """The names that the card's code has once it has read the file as its image, with a network of this config."""
    network = SimpleNamespace(eval=lambda: network, pretrained_cfg=config)
    patch.setattr(timm, "create_model", lambda *_, **__: network)
    code = block(card, "python").partition("with torch")[0]
    names: dict[str, Any] = {}
    exec(code.replace('"image.jpg"', repr(str(file))), names)
    return names


def save_odd(photographs, folder):
    """Images of every mode, one of 16 bits, and one that its EXIF data turn."""
    save_mixed(photographs, folder, 6, seed=0)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photographs[0].resize((90, 50)).save(folder / "turned.jpg", exif=exif)
    gray = np.random.default_rng(0).integers(0, 2**16, (50, 90), dtype=np.uint16)
    Image.fromarray(gray).save(folder / "I;16.png")


@pytest.mark.parametrize(
    "reading",
    [
        Reading(),
        Reading(exif_orientation=False, background=None),
        Reading(background="#20a0ff", shrink=20, in_chans=1),
    ],
    ids=str,
)
def test_the_code_of_the_card_reads_images_as_the_run_does(
    reading, photographs, tmp_path, monkeypatch
):
    save_odd(photographs, tmp_path / "odd")
    card = rendered(model={"fields": {"in_chans": reading.in_chans}}, data=values(reading))
    for file in (tmp_path / "odd").iterdir():
        image = read_by_the_card(card, file, monkeypatch, {})["image"]
        expected = load_image(file, reading=reading)
        assert np.array_equal(image.convert("RGB"), expected), file.name


READER = """
import numpy, torch

def read(path, reading):
    return torch.from_numpy(numpy.load(path))[reading.reader_args["bands"]]
"""


def test_the_code_of_the_card_reads_planes_as_the_run_does(tmp_path, monkeypatch):
    planes = np.random.default_rng(0).random((5, 30, 24), np.float32)
    planes[1, 3:6, 4:9] = np.nan
    np.save(tmp_path / "x.npy", planes)
    (tmp_path / "own_reader.py").write_text(READER)
    monkeypatch.syspath_prepend(tmp_path)
    reading = dict(in_chans=5, reader="own_reader:read", reader_args={"bands": [0, 1, 2, 4, 3]})
    transform = dict(mean=[0.1, 0.2, 0.3, 0.4, 0.5], std=[0.5, 0.4, 0.3, 0.2, 0.1], crop_pct=0.9)
    preprocessing = group(Planes, reading | transform | dict(img_size=16))
    card = rendered(model={"fields": {"in_chans": 5}}, data=values(preprocessing))
    config = transform | dict(input_size=(5, 16, 16), interpolation="bicubic")
    names = read_by_the_card(card, tmp_path / "x.npy", monkeypatch, config)
    expected = preprocessing.transform()(preprocessing.open(tmp_path / "x.npy", "", False))
    assert (names["transform"](names["image"]) - expected).abs().max() < 1e-4


ODD = "1\\n2\nimport os; os.system(1)\n```\n---\n<script>$x$</script>\u2028`{{ 7 * 7 }}\"'\\"
"""A text that would be code, markup, or the end of a block where it is not escaped."""
PLACES: dict[str, dict[str, Any]] = {
    "root": {"data": {"root": f"sets/{ODD}"}},
    "val_split": {"data": {"val_split": ODD}},
    "model": {"model": {"name": ODD, "fields": {"in_chans": 5}}, "about": {"model": ODD}},
    "fields": {"model": {"fields": {"in_chans": 5, ODD: ODD}}},
    "a class": {"about": {"class_names": ["a", ODD]}, "scores": {"per_class": {ODD: 75.0}}},
    "the repository": {"repo": f"me/{ODD}".replace("/script", "")},
}
"""Where it may stand, beside the settings of how images are prepared."""


@pytest.mark.parametrize("name", [*values(Planes()), *PLACES])
def test_no_value_leaves_its_place_in_the_card(name):
    differing = PLACES.get(name, {"data": {name: ODD}})
    differing["data"] = {"reader": "cait.extras.channels.planes:read"} | differing.get("data", {})
    card = rendered(**{"model": {"fields": {"in_chans": 5}}} | differing)
    assert not re.search(r"^\s*(import os;|<script|---$)", card.partition("\n# ")[2], re.M)
    assert "{{" not in card or "49" not in card
    nodes = ast.walk(ast.parse(block(card, "python")))
    assert "system" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    settings = yaml.safe_load(block(card, "yaml"))
    if name not in PLACES:
        assert settings["data"][name] == ODD
    assert huggingface_hub.ModelCard(card).data.eval_results[0].metric_value == 0.5


READERS: dict[str, Any] = {"python": ast.literal_eval, "json": json.loads}


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_a_value_on_one_line(language):
    text = written(ODD, language)
    assert len(text.splitlines()) == 1
    assert "```" not in text or language in ("html", "terminal")
    assert READERS.get(language, lambda _: ODD)(text) == ODD
    if language == "html":
        assert not {"<", ">", '"', "'"} & {*text}


def test_what_goes_to_the_hub_is_what_timm_loads(here, capsys):
    folder = Path("logs/mine/card")
    done = call(here, "card", "mine", "me/digits")
    *files, last = done.stdout.splitlines()
    names = ("README.md", "config.json", "curves.png", "model.safetensors")
    assert files == [f"{folder}/{name}" for name in names]
    assert last == f"next: hf upload me/digits {folder}"

    # The card's own example, on these files.
    example = block(Path(files[0]).read_text(), "python")
    assert "hf_hub:me/digits" in example
    image = next(Path("data/digits/val/3").iterdir())
    example = example.replace("image.jpg", str(image))
    exec(example.replace("hf_hub:me/digits", f"local-dir:{folder}"), {})
    classes = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert len(classes) == 5
    assert {*classes} <= {*"0123456789"}
    average = ckpt.average(torch.load("logs/mine/checkpoints/best.ckpt", weights_only=True))
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    assert torch.equal(loaded["head.weight"], average["head.weight"])

    # no weights stay beside a card that may be of others; a user's own files do
    (folder / "samples.md").touch()
    done = call(here, "card", "mine")
    assert done.stdout.split() == [files[0], files[2], f"{folder}/samples.md"]

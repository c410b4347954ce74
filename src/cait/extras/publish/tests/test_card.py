"""The model card, and timm's files for the Hub beside it."""

import ast
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import yaml
from harness import beside, call, parsed, save_mixed, table, works
from PIL import ExifTags, Image

from cait import ckpt
from cait.data.reading import Reading, load_image
from cait.extras.channels import READER
from cait.extras.channels.preprocessing import Planes
from cait.extras.publish import card as hub_card
from cait.plugins import Results
from cait.settings import values

TABLES = beside(__file__)
USUAL, ODD = TABLES["usual"], TABLES["odd"]


@pytest.fixture(scope="module")
def run(place, trained):
    shutil.copytree(trained, place / "logs/mine")


pytestmark = pytest.mark.usefixtures("run", "here")


def block(card, language):
    """The block of code in this language."""
    return re.search(rf"```{language}\n(.*?)\n```$", card, re.S | re.M)[1]


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_card_tells_what_the_run_has_written(here, weights):
    works(call(here, "card", "mine", f"--{weights}", "--license", "apache-2.0"))
    scores = parsed(Path("logs/mine/evaluation.json"))[weights]
    card = Path("logs/mine/card/README.md").read_text()
    data = huggingface_hub.ModelCard(card).data  # the Hub's own reader
    assert (data.library_name, data.license) == ("timm", "apache-2.0")
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type) == ("digits", "accuracy")
    assert result.metric_value == pytest.approx(scores["acc1"] / 100, abs=1e-4)
    assert f"| validation images | 360 | {scores['acc1']:.2f} % |" in card
    assert "- Data: digits, 1,437 training images\n- Checkpoint: step 6, epoch 1\n" in card
    assert str(here) not in card  # nothing of this machine


def rendered(case):
    """The card of a case, where something differs from the usual."""
    scores, about, model, data = (USUAL[name] | case.get(name, {}) for name in USUAL)
    tables = [Results(**table) for table in case.get("tables", [])]
    config = {"model": model, "data": data}
    return hub_card.text(case.get("repo", "me/own"), scores, about, config, "many", None, tables)


@pytest.mark.parametrize("case", table(__file__, "cards"))
def test_the_card_says_what_a_reader_needs(case):
    assert {*case["lines"]} <= {*rendered(case).splitlines()}


def read_by_the_card(card, file, patch, config):
    """The names that the card's code has once it has read the file as its image, with a network of this config."""
    network = SimpleNamespace(eval=lambda: network, pretrained_cfg=config)
    patch.setattr(timm, "create_model", lambda *_, **__: network)
    code = block(card, "python").partition("with torch")[0]
    names = {}
    exec(code.replace('"image.jpg"', repr(str(file))), names)
    return names


@pytest.fixture(scope="module")
def odd_images(photographs, tmp_path_factory):
    """Images of every mode, one of 16 bits, and one that its EXIF data turn."""
    folder = tmp_path_factory.mktemp("images") / "odd"
    save_mixed(photographs, folder, 6, seed=0)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photographs[0].resize((90, 50)).save(folder / "turned.jpg", exif=exif)
    gray = np.arange(0, 63_000, 14, np.uint16).reshape(50, 90)
    Image.fromarray(gray).save(folder / "deep.png")
    return [*folder.iterdir()]


@pytest.mark.parametrize("settings", TABLES["readings"], ids=str)
def test_the_code_of_the_card_reads_images_as_the_run_does(settings, odd_images, monkeypatch):
    reading = Reading(**settings)
    card = rendered({"model": {"fields": {"in_chans": reading.in_chans}}, "data": values(reading)})
    for file in odd_images:
        image = read_by_the_card(card, file, monkeypatch, {})["image"]
        expected = load_image(file, reading=reading)
        assert np.array_equal(image.convert("RGB"), expected), file.name


def test_the_code_of_the_card_reads_planes_as_the_run_does(tmp_path, monkeypatch):
    planes = np.random.default_rng(0).random((5, 30, 24), np.float32)
    planes[1, 3:6, 4:9] = np.nan
    file = tmp_path / "x.npy"
    np.save(file, planes)
    transform = dict(mean=[0.1, 0.2, 0.3, 0.4, 0.5], std=[0.5, 0.4, 0.3, 0.2, 0.1], crop_pct=0.9)
    bands = {"bands": [0, 1, 2, 4, 3]}
    settings = Planes(img_size=16, in_chans=5, reader=READER, reader_args=bands, **transform)
    card = rendered({"model": {"fields": {"in_chans": 5}}, "data": values(settings)})
    config = transform | dict(input_size=(5, 16, 16), interpolation="bicubic")
    names = read_by_the_card(card, file, monkeypatch, config)
    expected = settings.transform()(settings.open(file, "", False))
    assert (names["transform"](names["image"]) - expected).abs().max() < 1e-4


def check_escaped(case):
    """Nothing of the odd text is code, markup or the end of a block. Returns the settings that the card has."""
    card = rendered(case)
    assert not re.search(r"^\s*(import os;|<script|---$)", card.partition("\n# ")[2], re.M)
    assert "{{" not in card or "49" not in card
    assert "attr='system'" not in ast.dump(ast.parse(block(card, "python")))
    assert huggingface_hub.ModelCard(card).data.eval_results[0].metric_value == 0.5
    return yaml.safe_load(block(card, "yaml"))


@pytest.mark.parametrize("case", table(__file__, "places"))
def test_no_value_leaves_its_place_in_the_card(case):
    check_escaped(case)


@pytest.mark.parametrize("name", values(Planes()))
def test_no_setting_of_how_images_are_prepared_leaves_its_place_in_the_card(name):
    case = {"model": {"fields": {"in_chans": 5}}, "data": {"reader": READER, name: ODD}}
    assert check_escaped(case)["data"][name] == ODD


def test_what_goes_to_the_hub_is_what_timm_loads(here):
    folder = Path("logs/mine/card")
    folder.mkdir(exist_ok=True)
    (folder / "samples.md").touch()
    done = call(here, "card", "mine", "me/digits")
    *files, last = done.stdout.splitlines()
    names = ["README.md", "config.json", "curves.png", "model.safetensors", "samples.md"]
    assert files == [f"{folder}/{name}" for name in names]
    assert last == f"next: hf upload me/digits {folder}"
    average = ckpt.average(parsed(Path("logs/mine/checkpoints/best.ckpt")))
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    assert torch.equal(loaded["head.weight"], average["head.weight"])

    # no weights stay beside a card that may be of others; a user's own files do
    done = call(here, "card", "mine")
    assert done.stdout.split() == [files[0], files[2], files[4]]

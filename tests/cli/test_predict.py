"""`cait predict RUN IMAGE ...` and `module.predict`, against timm's transform and the network itself."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from harness import (
    CLASSES,
    REPO,
    SMALL,
    TWO_BLOCKS,
    call,
    ended,
    parsed,
    save_classes,
    save_mixed,
    works,
)
from modules import FIELDS
from PIL import Image
from timm.data import create_transform

import cait
from cait import ckpt
from cait.cli.predict import _paths
from cait.data.reading import load_image
from cait.errors import UserError

SCHEMA = parsed(REPO / "docs/predict.schema.json")
BEST = "logs/mixed.pt/checkpoints/best.ckpt"
GRAY, PALETTE, ALPHA = (f"images/some more/{name}" for name in ("0.jpg", "2.png", "3.png"))
RECIPE = [
    *SMALL,
    TWO_BLOCKS,
    "--data.root=photos",
    "--data.crop_pct=0.8",
    "--data.interpolation=bilinear",
    "--data.batch_size=4",
    "--data.num_workers=0",
    "--trainer.max_epochs=1",
    "--model.warmup_epochs=0",
    "--model.lr=0.01",
    "--ema.decay=0.9",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, photographs):
    """A run of a moving average, called as a file of weights, and a folder of images. Some of these cannot be read."""
    place = tmp_path_factory.mktemp("predict")
    save_classes(photographs, place / "photos", 6, 2)
    save_mixed(photographs, place / "images/some more", 5, 20)
    (place / "images/broken.jpg").write_bytes(b"no image")
    whole = (place / GRAY).read_bytes()
    (place / "images/some more/cut.jpg").write_bytes(whole[: len(whole) // 2])
    ended(place, "mixed.pt", RECIPE)
    (place / "photos").rename(place / "gone")  # the checkpoint knows the classes
    return place


def transformed(path):
    transform = create_transform((3, 16, 16), crop_pct=0.8, interpolation="bilinear")
    return transform(load_image(path))


def expected(path, ema):
    """Probabilities by the network alone, of an image that timm has prepared."""
    checkpoint = ckpt.read_checkpoint(BEST)
    network = cait.create_model("xxs24", 16, 3, **FIELDS | {"embed_dim": 32}).eval()
    network.load_state_dict(ckpt.average(checkpoint) if ema else ckpt.weights(checkpoint))
    with torch.no_grad():
        return network(transformed(path)[None])[0].softmax(0)


def predict(place, *words):
    done = works(call(place, "predict", *words))
    return done


def rows_of(text):
    """The lines of JSON, by the image's path."""
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        jsonschema.validate(row, SCHEMA)
    return {row["path"]: row for row in rows}


@pytest.fixture(scope="module")
def printed(place):
    return predict(place, "mixed.pt", "images", "missing.png", "--format=jsonl")


def test_every_image_gets_a_row_and_what_cannot_be_read_the_reason(place, printed):
    rows = rows_of(printed.stdout)
    files = sorted(str(path.relative_to(place)) for path in (place / "images").rglob("*.*"))
    assert [*rows] == [*files, "missing.png"]
    assert rows["images/broken.jpg"]["error"] == "not an image"
    unreadable = [path for path, row in rows.items() if "error" in row]
    assert unreadable == ["images/broken.jpg", "images/some more/cut.jpg", "missing.png"]
    for path in unreadable:
        assert f"cannot read {path}: {rows[path]['error']}\n" in printed.stderr
    assert "8 images in " in printed.stderr
    assert "3 unreadable" in printed.stderr


def test_the_probabilities_are_the_networks(here, printed):
    for path, row in rows_of(printed.stdout).items():
        if "error" in row:
            continue
        probabilities = expected(path, ema=True)
        best = []
        for index in probabilities.argsort(descending=True).tolist():
            probability = pytest.approx(probabilities[index].item(), abs=1e-5)
            best.append({"class": CLASSES[index], "index": index, "probability": probability})
        assert row["predictions"] == best


def test_a_file_of_csv_has_the_same(place, printed):
    """Golden files show how it looks, and what is on the screen."""
    rows = rows_of(printed.stdout)
    done = predict(place, "mixed.pt", "images", "--top_k=2", "--output=out/two.csv")
    assert done.stdout == "out/two.csv\n"
    for cells in parsed(place / "out/two.csv"):
        row = rows[cells["path"]]
        assert cells["error"] == row.get("error", "")
        if "predictions" in row:
            second = row["predictions"][1]
            assert cells["class_2"] == second["class"]
            assert float(cells["probability_2"]) == pytest.approx(second["probability"], abs=6e-5)


def test_the_suffix_is_the_format_and_no_class_is_shown_twice(place):
    predict(place, "mixed.pt", GRAY, "--top_k=99", "--output=all.jsonl")
    row = rows_of((place / "all.jsonl").read_text())[GRAY]
    assert len(row["predictions"]) == 3


def test_images_that_can_all_not_be_read_are_an_error(place):
    done = call(place, "predict", "mixed.pt", "images/broken.jpg", "missing.jpg")
    assert done.returncode == 2
    assert done.stderr.endswith("cait: error: none of the 2 images can be read\n")


def test_names_come_from_files_and_standard_input(here, monkeypatch):
    names = f"\ufeff{PALETTE}\n\nodd \udcff.png\n".encode(errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(names)))
    rows = rows_of(predict(here, "mixed.pt", GRAY, "-", "--format=jsonl").stdout)
    assert [*rows] == [GRAY, PALETTE, "odd \udcff.png"]
    assert "error" in rows["odd \udcff.png"]


TREE = """
mkdir -p d/a/@eaDir d/.thumbnails store
touch d/a/1.png d/a/2.png store/4.png store/5.png d/a/@eaDir/3.png d/.thumbnails/3.png
ln -s . d/a/again; ln -s .. d/a/back; ln -s ../store d/b; ln -s gone d/c
"""


def test_a_folder_is_searched_as_in_training(tmp_path, monkeypatch, capsys):
    """Links are followed, each folder is listed once, and broken links are counted."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-ec", TREE], check=True)
    assert list(_paths("d")) == ["d/a/1.png", "d/a/2.png", "d/b/4.png", "d/b/5.png"]
    said = capsys.readouterr().err
    assert "d; left out: " in said
    assert "broken links (1): c" in said
    subprocess.run(["bash", "-ec", "mkfifo d/a/pipe.png; ln -s nowhere d/a/gone.png"], check=True)
    assert list(_paths("d/a"))[-2:] == ["d/a/gone.png", "d/a/pipe.png"]  # rows that say so


def test_probabilities_that_are_not_finite_are_no_prediction(here, tmp_path):
    broken = tmp_path / "broken.ckpt"
    content = torch.load(BEST, weights_only=True)
    content["state_dict"]["model.head.bias"][0] = torch.nan
    torch.save(content, broken)
    done = call(here, "predict", str(broken), GRAY, "--raw", "--format=jsonl")
    assert done.returncode == 2
    assert f"no finite probabilities for {GRAY}" in done.stderr
    assert done.stdout == ""
    with pytest.raises(UserError, match="finite"):
        cait.load(broken, raw=True).predict(GRAY)


def test_a_loaded_module_predicts(here):
    module = cait.load("mixed.pt")
    assert module.class_names == CLASSES
    assert not module.training
    assert (module.transform(GRAY) - transformed(GRAY)).abs().max() < 1e-5
    both = module.predict([Path(GRAY), Image.open(ALPHA)], top_k=2)
    for path, (best, _) in zip((GRAY, ALPHA), both, strict=True):
        assert [*best] == ["class", "index", "probability"]
        probability = expected(path, ema=True).max().item()
        assert best["probability"] == pytest.approx(probability, abs=1e-5)


def test_a_checkpoint_alone_predicts_with_its_raw_weights(here):
    """Lightning's own loader reads it too; it says how images are prepared."""
    probability = expected(GRAY, ema=False).max().item()
    assert abs(probability - expected(GRAY, ema=True).max().item()) > 1e-3
    module = cait.CaiTModule.load_from_checkpoint(BEST, weights_only=True)
    best = module.predict(GRAY)
    assert module.training
    assert best[0]["probability"] == pytest.approx(probability, abs=1e-5)
    away = shutil.copy(BEST, "away.ckpt")
    for path in (BEST, away):
        assert cait.load(path, raw=True).predict(GRAY) == best
    rows = rows_of(predict(here, "logs/mixed.pt", GRAY, "--format=jsonl", "--raw").stdout)
    assert rows[GRAY]["predictions"][0]["probability"] == pytest.approx(probability, abs=1e-5)


class Fixed(cait.ImageNetDataModule):
    """Its images are prepared in one way, so its constructor takes no such settings."""

    def __init__(self, img_size: int):
        super().__init__(img_size=img_size, crop_pct=0.8, interpolation="bilinear")


def test_a_class_of_ones_own_gets_the_settings_that_its_constructor_takes(here):
    predicted = cait.load("mixed.pt", data=Fixed).predict(GRAY)
    assert predicted == cait.load("mixed.pt").predict(GRAY)


def test_classes_that_a_checkpoint_does_not_name_are_numbered(here):
    checkpoint = torch.load(BEST, weights_only=True)
    del checkpoint["ImageNetDataModule"]  # as a script with loaders of its own leaves it
    torch.save(checkpoint, "unnamed.ckpt")
    rows = rows_of(predict(here, "unnamed.ckpt", GRAY, "--format=jsonl").stdout)
    for answer in rows[GRAY]["predictions"]:
        assert answer["class"] == f"class {answer['index']}"

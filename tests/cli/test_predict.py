"""`cait predict RUN IMAGE ...` and `module.predict`, against timm's transform and the network itself."""

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from harness import CLASSES, REPO, SMALL, save_classes, save_mixed
from PIL import Image
from timm.data import create_transform

import cait as package
from cait import ckpt
from cait.cli import main
from cait.cli.predict import _paths
from cait.data.reading import load_image
from cait.errors import UserError

SCHEMA = json.loads((REPO / "docs/predict.schema.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """A run of a moving average, called as a file of weights, and a folder of images. Some of these cannot be read."""
    place = tmp_path_factory.mktemp("predict")
    save_classes(photographs, place / "photos", 6, 2)
    save_mixed(photographs, place / "images/some more", 5, 20)
    (place / "images/broken.jpg").write_bytes(b"no image")
    cut = (place / "images/some more/0.jpg").read_bytes()
    (place / "images/some more/cut.jpg").write_bytes(cut[: len(cut) // 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        how = [
            "--data.crop_pct=0.8",
            "--data.interpolation=bilinear",
            "--data.batch_size=4",
            "--data.num_workers=0",
        ]
        steps = [
            "--trainer.max_epochs=1",
            "--model.warmup_epochs=0",
            "--model.lr=0.01",
            "--ema.decay=0.9",
        ]
        main(["fit", *SMALL, "--data.root=photos", "--run_name=mixed.pt", *how, *steps])
    (place / "photos").rename(place / "gone")  # the checkpoint knows the classes
    return place


def expected(path: Path, ema: bool) -> torch.Tensor:
    """Probabilities by the network alone, of an image that timm has prepared."""
    checkpoint = ckpt.read_checkpoint("logs/mixed.pt/checkpoints/best.ckpt")
    network = package.create_model(
        "xxs24", 16, 3, embed_dim=32, depth=2, num_heads=2, patch_size=4
    ).eval()
    network.load_state_dict(ckpt.average(checkpoint) if ema else ckpt.weights(checkpoint))
    timms = create_transform((3, 16, 16), crop_pct=0.8, interpolation="bilinear")
    with torch.no_grad():
        return network(timms(load_image(path))[None])[0].softmax(0)


def lines(text: str) -> list[dict]:
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        jsonschema.validate(row, SCHEMA)
    return rows


def test_every_image_gets_its_row_in_every_format(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["predict", "mixed.pt", "images", "missing.png", "--format", "jsonl"])
    told = capsys.readouterr()
    rows = lines(told.out)
    files = sorted(str(path) for path in Path("images").rglob("*") if path.is_file())
    assert [row["path"] for row in rows] == [*files, "missing.png"]
    errors = {row["path"]: row["error"] for row in rows if "error" in row}
    assert list(errors) == ["images/broken.jpg", "images/some more/cut.jpg", "missing.png"]
    assert errors["images/broken.jpg"] == "not an image"
    for path, error in errors.items():
        assert f"cannot read {path}: {error}\n" in told.err
    assert "8 images in " in told.err
    assert "3 unreadable" in told.err
    for row in rows:
        if "error" not in row:
            probabilities = expected(row["path"], ema=True)
            got = torch.tensor([best["probability"] for best in row["predictions"]])
            indices = [best["index"] for best in row["predictions"]]
            assert (got - probabilities[indices]).abs().max() < 1e-5
            assert indices == probabilities.argsort(descending=True).tolist()
            assert [best["class"] for best in row["predictions"]] == [
                CLASSES[index] for index in indices
            ]

    main(
        [
            "predict",
            "mixed.pt",
            "images",
            "missing.png",
            "--format=csv",
            "--top_k=2",
            "--output=out/two.csv",
        ]
    )
    assert capsys.readouterr().out == "out/two.csv\n"
    with open("out/two.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["path", "class", "probability", "class_2", "probability_2", "error"]
    for ours, row in zip(table, rows, strict=True):
        assert ours["error"] == row.get("error", "")
        best = row.get("predictions", [{"class": "", "probability": ""}] * 2)
        assert [ours["class"], ours["class_2"]] == [best[0]["class"], best[1]["class"]]
        assert "error" in row or float(ours["probability_2"]) == pytest.approx(
            best[1]["probability"], abs=6e-5
        )

    # the suffix is the format
    main(["predict", "mixed.pt", "images", "--top_k=99", f"--output={here / 'all.jsonl'}"])
    told = capsys.readouterr()
    assert told.out == f"{here / 'all.jsonl'}\n"
    assert {
        len(row["predictions"])
        for row in lines(Path("all.jsonl").read_text())
        if "predictions" in row
    } == {3}

    main(["predict", "--top_k", "1", "mixed.pt", "images", "missing.png"])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(rows)
    for line, row in zip(shown, rows, strict=True):
        ending = "unreadable"
        if "error" not in row:
            ending = f"{row['predictions'][0]['class']} {row['predictions'][0]['probability']:6.1%}"
        assert line.startswith(row["path"])
        assert line.endswith(ending)


def test_names_come_from_files_and_standard_input(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = "images/some more/0.jpg", "images/some more/2.png"
    names = f"\ufeff{two}\n\nodd \udcff.png\n".encode(errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(names)))
    main(["predict", "logs/mixed.pt", one, "-", "--format=jsonl", "--raw"])
    rows = lines(capsys.readouterr().out)
    assert [row["path"] for row in rows] == [one, two, "odd \udcff.png"]
    assert "error" in rows[-1]
    best = rows[0]["predictions"][0]
    assert best["probability"] == pytest.approx(
        expected(one, ema=False)[best["index"]].item(), abs=1e-5
    )
    assert abs(best["probability"] - expected(one, ema=True)[best["index"]].item()) > 1e-3


def test_a_folder_is_searched_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links are followed, each folder is listed once, and broken links are counted."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "d/a/1.png",
        "d/a/2.png",
        "d/.thumbnails/3.png",
        "d/a/@eaDir/3.png",
        "store/4.png",
        "store/5.png",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(name)
    for link, target in {"a/again": ".", "a/back": "..", "b": "../store", "c": "gone"}.items():
        Path("d", link).symlink_to(target)
    assert list(_paths("d")) == ["d/a/1.png", "d/a/2.png", "d/b/4.png", "d/b/5.png"]
    told = capsys.readouterr().err
    for words in ("d; left out: ", "broken links (1): c"):
        assert words in told
    os.mkfifo("d/a/pipe.png")
    Path("d/a/gone.png").symlink_to("nowhere")
    assert [*_paths("d/a")][-2:] == ["d/a/gone.png", "d/a/pipe.png"]  # rows that say so


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mixed.pt"], "the following arguments are required: IMAGE"),
        ([], "the following arguments are required: RUN, IMAGE"),
        (["other", "images"], "there is no run logs/other"),
        (["mixed.pt", "images", "--top_k=0"], "--top_k must be at least 1"),
        (["mixed.pt", "images/broken.jpg", "missing.jpg"], "none of the 2 images can be read"),
        (["mixed.pt", "images", "--output=images/broken.jpg"], "images/broken.jpg exists; move it away"),
        (["mixed.pt", "logs/mixed.pt/checkpoints"], "no images below logs/mixed.pt/checkpoints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input_is_told_in_a_line(
    arguments: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["predict", *arguments])
    assert stop.value.code == 2
    assert f"cait: error: {told}" in capsys.readouterr().err


def test_probabilities_that_are_not_finite_are_no_prediction(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load("logs/mixed.pt/checkpoints/best.ckpt", weights_only=True)
    content["state_dict"]["model.head.bias"][0] = torch.nan
    torch.save(content, tmp_path / "broken.ckpt")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(tmp_path / "broken.ckpt"), "images", "--raw", "--format=jsonl"])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert "the network has no finite probabilities" in told.err
    assert "NaN" not in told.out
    with pytest.raises(UserError, match="the network's answers are not finite"):
        package.load(tmp_path / "broken.ckpt", raw=True).predict("images/some more/0.jpg")


def test_a_loaded_module_predicts(here: Path) -> None:
    paths = ["images/some more/0.jpg", "images/some more/3.png"]
    module = package.load("mixed.pt")
    assert module.class_names == CLASSES
    assert not module.training
    of_one, of_both = (
        module.predict(paths[0]),
        module.predict([Path(paths[0]), Image.open(paths[1])], top_k=2),
    )
    assert [best["index"] for best in of_one[:2]] == [best["index"] for best in of_both[0]]
    for path, best in zip(paths, of_both, strict=True):
        assert [*best[0]] == ["class", "index", "probability"]
        assert best[0]["probability"] == pytest.approx(
            expected(path, ema=True).max().item(), abs=1e-5
        )
        timms = create_transform((3, 16, 16), crop_pct=0.8, interpolation="bilinear")
        assert (module.transform(path) - timms(load_image(path))).abs().max() < 1e-5
    with pytest.raises(UserError, match=r"cannot read the image images/broken\.jpg: not an image"):
        module.predict(["images/broken.jpg"])
    with pytest.raises(UserError, match=r"there is no run logs/nowhere; runs: mixed\.pt"):
        package.load("logs/nowhere")
    # Lightning's own loader reads a checkpoint alone, with the raw weights.
    path = Path("logs/mixed.pt/checkpoints/best.ckpt")
    alone = package.CaiTModule.load_from_checkpoint(path, weights_only=True)
    best = alone.predict(paths[0])[0]
    assert best["probability"] == pytest.approx(
        expected(paths[0], ema=False).max().item(), abs=1e-5
    )
    assert alone.training
    assert package.load(path, raw=True).predict(paths[0]) == alone.predict(paths[0])
    # without the run's folder the checkpoint says how images are prepared
    away = shutil.copy(path, "away.ckpt")
    assert package.load(away, raw=True).predict(paths[0]) == alone.predict(paths[0])


class Fixed(package.ImageNetDataModule):
    """Its images are prepared in one way, so its constructor takes no such settings."""

    def __init__(self, img_size: int) -> None:
        super().__init__(img_size=img_size, crop_pct=0.8, interpolation="bilinear")


def test_a_class_of_ones_own_gets_the_settings_that_its_constructor_takes(here: Path) -> None:
    image = "images/some more/0.jpg"
    predicted = package.load("mixed.pt", data=Fixed).predict(image)
    assert predicted == package.load("mixed.pt").predict(image)


def test_classes_that_a_checkpoint_does_not_name_are_numbered(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load("logs/mixed.pt/checkpoints/best.ckpt", weights_only=True)
    del checkpoint["ImageNetDataModule"]  # as a script with loaders of its own leaves it
    torch.save(checkpoint, "unnamed.ckpt")
    main(["predict", "unnamed.ckpt", "images/some more/0.jpg", "--format=jsonl"])
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    names = {best["class"]: best["index"] for best in row["predictions"]}
    assert names == {f"class {index}": index for index in range(len(CLASSES))}

"""The baselines beside a run: their figures against scikit-learn's and torch's own, and where they are shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from harness import DEVICES
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import cait
from cait import plugins
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.extras.baselines import report, scoring

FEW = ["--trainer.max_epochs=2", "--data.num_workers=0", "--model.fields.depth=1", *DEVICES]


def images(root: str, most: int = scoring.MOST, network: nn.Module | None = None, size: int = 8) -> list:
    data = ImageNetDataModule(root=root, img_size=size, crop_pct=1.0, num_workers=0, batch_size=2)
    data.setup()
    cpu = torch.device("cpu")
    return [scoring.read(each.samples, data, network, cpu, most) for each in (data.train_images, data.val_images)]


def test_the_regression_is_scikit_learns_on_the_digits_themselves(digits_root: Path) -> None:
    """The oracle has the digits of the package; the baseline has read them from files, as RGB."""
    train, val = images(str(digits_root))
    digits = load_digits()
    held_out = sorted(int(file.stem) for file in digits_root.glob("val/*/*.png"))
    kept = np.setdiff1d(np.arange(len(digits.target)), held_out)
    pixels = np.round(digits.data * (255 / 16)).astype(np.float32)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(pixels[kept], digits.target[kept])
    score = 100 * model.score(pixels[held_out], digits.target[held_out])
    answers, how = scoring.regression(train, val, 10)
    assert how == "scikit-learn, on the pixels"
    assert scoring.accuracies(answers, val.labels)["acc1"] == pytest.approx(score, abs=0.3)  # one image of 360
    assert scoring.accuracies(scoring.chance(train, val, 10)[0], val.labels)["acc1"] == pytest.approx(100 / 10, abs=1)


def test_accuracies_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    labels, answers = rng.integers(0, 4, 50), rng.integers(0, 4, 50)
    assert scoring.accuracies(answers, labels) == pytest.approx(
        {
            "acc1": 100 * accuracy_score(labels, answers),
            "acc1_macro": 100 * balanced_accuracy_score(labels, answers),
        }
    )


def test_features_are_what_the_head_of_any_network_sees() -> None:
    """Of timm's networks as timm pools them, of CaiT the class token; the head turns them into the logits."""
    pixels = torch.rand(3, 3, 32, 32)
    resnet = timm.create_model("test_resnet", num_classes=10).eval()
    with torch.inference_mode():
        pooled = resnet.forward_head(resnet.forward_features(pixels), pre_logits=True).numpy()
    assert np.allclose(scoring.inputs(resnet, scoring.last_linear(resnet, 10), pixels), pooled, atol=1e-6)
    network = cait.create_model("xxs24", img_size=32, num_classes=10, embed_dim=32, depth=1, num_heads=2).eval()
    features = torch.from_numpy(scoring.inputs(network, scoring.last_linear(network, 10), pixels))
    with torch.inference_mode():
        assert torch.allclose(network.head(features), network(pixels), atol=1e-6)
    assert scoring.last_linear(nn.Sequential(nn.Conv2d(3, 10, 1)), 10) is None


def test_a_large_set_is_thinned_evenly_and_says_so(digits_root: Path) -> None:
    train, val = images(str(digits_root), most=100)
    assert np.bincount(train.labels).tolist() == pytest.approx([10] * 10, abs=2)
    _, how = scoring.regression(train, val, 10, work=50 * 64 * 10)
    assert how == "scikit-learn, on the pixels of 50 of 100 images"


def test_large_images_are_averaged_and_grey_ones_have_one_channel() -> None:
    batch = torch.arange(256, dtype=torch.uint8).repeat(2, 192, 1)[..., None].repeat(1, 1, 1, 3)[:, :192, :192]
    pooled = scoring.small(batch)
    assert pooled.shape == (2, 3 * scoring.SIDE**2)
    assert pooled[0, :3].tolist() == [1, 4, 7]  # means of 0, 1, 2, of 3, 4, 5 and of 6, 7, 8
    (one,) = scoring.grey(pooled)
    assert one.shape == (2, scoring.SIDE**2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A run on a folder, by its recipe."""
    place = tmp_path_factory.mktemp("baselines")
    slow = "--model.lr=1e-5"  # for a run that the regression beats
    main(["fit", f"--data.root={digits_root}", *FEW, slow, f"--trainer.default_root_dir={place}", "--run_name=own"])
    return place / "own"


def test_a_run_on_a_folder_has_them_in_its_file_and_its_summary(run: Path, tmp_path, capsys) -> None:
    found = json.loads((run / report.FILE).read_text())
    assert [entry["name"] for entry in found["baselines"]] == list(scoring.ANSWERS)
    assert found["images"] == {"training": 1437, "validation": 360}
    assert found["baselines"][1]["acc1"] > 90 > 20 > found["baselines"][0]["acc1"]
    shutil.copytree(run, tmp_path / "own")
    (tmp_path / "own" / report.FILE).write_text("stale")
    main(["resume", str(tmp_path / "own"), "--trainer.max_epochs=3"])
    out = capsys.readouterr().out
    again = json.loads((tmp_path / "own" / report.FILE).read_text())
    assert again["step"] > found["step"]
    assert again["baselines"][1]["acc1"] == found["baselines"][1]["acc1"]
    assert f"{again['baselines'][1]['acc1']:.2f} %   scikit-learn, on the pixels" in out
    assert re.search(
        r"logistic regression: \d+\.\d+ points better than this run", " ".join(out.replace("│", " ").split())
    )
    assert "--minutes 10" in out


def test_no_other_run_has_them(digits_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"--trainer.default_root_dir={tmp_path}"
    main(["fit", f"--data.root={digits_root}", *FEW, "--trainer.max_epochs=1", "--baselines=false", place])
    config = Path(cait.__file__).parents[2] / "configs/digits.yaml"
    main(["fit", f"--config={config}", f"--data.root={digits_root}", *FEW, "--trainer.max_steps=2", place])
    assert "baselines" not in capsys.readouterr().out
    assert not list(tmp_path.rglob(report.FILE))


def test_a_failure_is_a_line_and_the_run_ends_well(run, tmp_path, monkeypatch, capsys) -> None:
    shutil.copytree(run, tmp_path / "own")

    def fails(*_: object) -> None:
        raise ValueError("no room\nfor this")

    monkeypatch.setitem(scoring.ANSWERS, "logistic regression", fails)
    main(["resume", str(tmp_path / "own"), "--trainer.max_epochs=3"])
    out = capsys.readouterr().out
    assert "no baselines: no room" in out
    assert "trained" in out
    assert not (tmp_path / "own" / report.FILE).exists()


def found(run_acc1: float, best: float) -> dict:
    scores = {"how": "so", "acc1_macro": 0.0, "seconds": 1.0}
    return {
        "step": 7,
        "metric": "acc1",
        "run": {"acc1": run_acc1, "acc1_macro": 99.0},
        "baselines": [{"name": "chance", "acc1": 10.0, **scores}, {"name": "<regression>", "acc1": best, **scores}],
    }


def test_a_better_baseline_is_said_with_what_to_try(tmp_path: Path) -> None:
    (tmp_path / report.FILE).write_text(json.dumps(found(50.0, 62.5)))
    table = plugins.results(tmp_path)[0]
    assert [row[0] for row in table.rows] == ["<regression>", "this run", "chance"]
    assert table.note == "<regression>: 12.50 points better than this run"
    (tmp_path / "config.yaml").touch()
    config = SimpleNamespace(baselines=True)
    program = SimpleNamespace(script=None)
    given = SimpleNamespace(folder=tmp_path, config=config, data=SimpleNamespace(root="my photos"), program=program)
    from cait.extras import baselines

    command = "make train DATA='my photos' ARGS=\"--minutes 10\""
    assert baselines.suggest(given) == [("try", command)]
    os.utime(tmp_path / "config.yaml", (time.time() - 700,) * 2)  # of a run that had more time
    assert baselines.suggest(given) == []
    (tmp_path / "config.yaml").touch()
    for ours in (63.0, 62.5, float(torch.tensor(62.499))):  # not better by what rounding makes of it
        (tmp_path / report.FILE).write_text(json.dumps(found(ours, 62.5)))
        assert (plugins.results(tmp_path)[0].note, baselines.suggest(given)) == ("", [])


def test_an_unreadable_image_is_left_out(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for number in range(5):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (number * 40,) * 3).save(tmp_path / label / f"{number}.png")
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    train, val = images(str(tmp_path))
    assert len(train.labels) + len(val.labels) == 9

"""What the extra counts, held against scikit-learn, torchmetrics and timm; further sets, ReaL, mirror images."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import scored
import torch
from harness import LIMIT, start
from PIL import Image
from scored import BROKEN, NAMES, PART, TWO, logits_of, validation
from sklearn.metrics import balanced_accuracy_score, confusion_matrix
from timm.data.real_labels import RealLabelsImagenet
from torchmetrics.classification import MulticlassCalibrationError

from cait.cli import main

WEIGHTS = pytest.mark.parametrize("weights", ["raw", "ema"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has seen the digits, and further sets of them."""
    place = tmp_path_factory.mktemp("evaluation")
    scored.write_sets(place)
    scored.train(place)
    return place


@pytest.fixture(scope="module")
def evaluated(place: Path) -> dict:
    """What two processes find."""
    process = start(
        place, "eval", "mine", "--real=real.json", "--v2=v2", "--extra.part=part", "--wanted_accuracy=0.25", *TWO
    )
    shown, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, shown
    return {"shown": shown, **json.loads((place / "logs/mine/evaluation.json").read_text())}


@WEIGHTS
@pytest.mark.parametrize("part", ["val", "v2"])
def test_counts_are_scikit_learns_over_two_processes(place: Path, evaluated: dict, weights: str, part: str) -> None:
    figures = evaluated[weights] if part == "val" else evaluated[weights]["v2"]
    paths = [path for path in (place / ("data/val" if part == "val" else "v2")).glob("*/*") if path.name != BROKEN]
    labels = [int(path.parent.name.removeprefix("n")) for path in paths]
    logits = logits_of(place, weights, paths)
    guesses = logits.argmax(dim=1)
    expected = confusion_matrix(labels, guesses, labels=range(12))
    assert figures["confusion"] == expected.tolist()
    assert figures["images"] == len(paths) == (300 if part == "val" else 199)
    shares = 100 * expected.diagonal() / expected.sum(axis=1)
    assert figures["per_class"] == pytest.approx(dict(zip(NAMES, shares, strict=True)))
    assert figures["acc1"] == pytest.approx(100 * expected.trace() / len(paths), rel=1e-5)
    among_five = (logits.topk(5).indices == torch.tensor(labels)[:, None]).any(dim=1)
    assert figures["acc5"] == pytest.approx(100 * among_five.float().mean().item(), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
    assert figures["loss"] == pytest.approx(loss, rel=1e-4)


@WEIGHTS
def test_how_far_to_trust_the_probabilities(place: Path, evaluated: dict, weights: str) -> None:
    figures = evaluated[weights]
    paths, labels = validation(place)
    probabilities = logits_of(place, weights, paths).softmax(dim=1)
    confidence, guesses = probabilities.max(dim=1)
    theirs = MulticlassCalibrationError(12, n_bins=15, norm="l1")(probabilities, labels)
    assert figures["calibration"]["ece"] == pytest.approx(100 * theirs.item(), abs=0.01)
    bins = [each for each in figures["calibration"]["bins"] if each["images"]]
    assert sum(each["images"] for each in bins) == 300
    for key, mean in (("accuracy", figures["acc1"]), ("confidence", 100 * confidence.mean().item())):
        assert sum(each["images"] * each[key] for each in bins) / 300 == pytest.approx(mean, rel=1e-4)
    assert figures["acc1_macro"] == pytest.approx(100 * balanced_accuracy_score(labels, guesses))
    for row in figures["thresholds"]:
        answered = confidence >= row["threshold"]
        assert row["coverage"] == pytest.approx(100 * answered.float().mean().item())
        if answered.any():
            assert row["accuracy"] == pytest.approx(100 * (guesses == labels)[answered].float().mean().item())
    reached = figures["wanted_accuracy"]
    hits = (guesses == labels)[confidence.argsort(descending=True)].float().cumsum(0)
    most = hits[hits / torch.arange(1, 301) >= 0.25].max().item() if reached["threshold"] is not None else 0
    assert reached["coverage"] * (reached["accuracy"] or 0) * 300 / 100**2 == pytest.approx(most)
    matrix = confusion_matrix(labels, guesses, labels=range(12))
    assert set(figures["never_predicted"]) == {NAMES[i] for i in range(12) if matrix[:, i].sum() == 0}
    np.fill_diagonal(matrix, 0)
    assert [pair["images"] for pair in figures["confusions"]] == sorted(matrix[matrix > 0], reverse=True)[:20]
    with Image.open(place / "logs/mine/evaluation-reliability.png") as drawn:
        assert drawn.width > 500


@WEIGHTS
def test_a_set_of_some_classes_is_scored_among_them(place: Path, evaluated: dict, weights: str) -> None:
    paths = sorted(path for path in (place / "v2").glob("*/*") if int(path.parent.name) in PART)
    labels = torch.tensor([PART.index(int(path.parent.name)) for path in paths])
    logits = logits_of(place, weights, paths)[:, PART]  # as the authors of ImageNet-A and -R do
    figures = evaluated[weights]["extra"]["part"]
    assert (figures["images"], figures["classes"]) == (len(paths), 3)
    assert figures["acc1"] == pytest.approx(100 * (logits.argmax(dim=1) == labels).float().mean().item(), rel=1e-5)
    assert figures["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


@WEIGHTS
def test_real_is_timms(place: Path, evaluated: dict, weights: str) -> None:
    paths = sorted((place / "data/val").glob("*/*"))
    broken = next(path for path in paths if path.name == BROKEN)
    logits = logits_of(place, weights, [path for path in paths if path != broken])
    logits = torch.cat([logits[: paths.index(broken)], torch.zeros(1, 12), logits[paths.index(broken) :]])
    theirs = RealLabelsImagenet([str(path) for path in paths], real_json=str(place / "real.json"))
    theirs.add_result(logits)
    figures = evaluated[weights]["real"]
    assert (figures["acc1"], figures["acc5"]) == pytest.approx((theirs.get_accuracy(1), theirs.get_accuracy(5)))
    assert figures["images"] == len(theirs.is_correct[1]) < 250


def test_what_is_said_of_it(evaluated: dict) -> None:
    shown = evaluated["shown"]
    weakest = min((share, name) for name, share in evaluated["raw"]["per_class"].items())
    assert shown.count(f"weakest classes: {weakest[1]} ({weakest[0]:.1f} %)") == 1  # one process speaks
    for line in (
        ("top-1", evaluated["raw"]["acc1"], evaluated["ema"]["acc1"]),
        ("ReaL top-1", evaluated["raw"]["real"]["acc1"], evaluated["ema"]["real"]["acc1"]),
        ("V2 top-5", evaluated["raw"]["v2"]["acc5"], evaluated["ema"]["v2"]["acc5"]),
    ):
        assert re.search(rf" {line[0]} +│ +{line[1]:.2f} % │ +{line[2]:.2f} % ", shown)
    assert {"tta": None, "real": "real.json", "v2": "v2", "extra": {"part": "part"}}.items() <= evaluated.items()
    unreached = evaluated["raw"]["wanted_accuracy"]["threshold"] is None
    words = ("for 25 % accuracy: answer from", "no probability is high enough: no answers are right 25 %")
    assert words[unreached] in shown


@pytest.mark.slow
def test_mirror_images_count_half(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    main(["eval", "mine", "--data.num_workers=0", "--tta=hflip", "--output=mirrored/scores.json"])
    found = json.loads(Path("mirrored/scores.json").read_text())
    paths, labels = validation(place)
    for weights in ("raw", "ema"):
        views = [logits_of(place, weights, paths, mirrored).softmax(dim=1) for mirrored in (False, True)]
        mean = (views[0] + views[1]) / 2
        acc1 = 100 * (mean.argmax(dim=1) == labels).float().mean().item()
        assert found[weights]["acc1"] == pytest.approx(acc1, rel=1e-5)
        assert found[weights]["loss"] == pytest.approx(
            torch.nn.functional.nll_loss(mean.log(), labels).item(), rel=1e-4
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--real=nowhere.json"], "No such file or directory"),
        (["--extra.a=nowhere"], "nowhere does not exist"),
        (["--wanted_accuracy=95"], "--wanted_accuracy is above 0 and at most 1, as 0.95; got 95"),
    ],
)
def test_what_cannot_be_scored_is_told_in_one_line(
    arguments: list[str], words: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    with pytest.raises(SystemExit) as stop:
        main(["eval", "mine", "--data.num_workers=0", *arguments])
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    assert words in told[0]

"""Evaluation: what `cait eval` counts, held against scikit-learn and timm; ReaL, ImageNet-V2, what was published."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cait.cli.scores import write
from cait.extras.evaluation.callback import CLASSES_IN_JSON, Counts, Evaluation, RealAccuracy
from harness import LIMIT, REPO, SMALL, start
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score, confusion_matrix
from timm.data import ImageNetInfo, create_transform
from timm.data.real_labels import RealLabelsImagenet
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

from cait.cli import main
from cait.data.folder import scan_extra_val
from cait.data.listing import Files
from cait.data.reading import load_rgb
from cait.errors import UserError
from cait.extras.evaluation import calibration
from cait.extras.evaluation.extra_sets import ALEXNET, mce, open_extra
from cait.extras.evaluation.real_labels import real_labels
from cait.extras.paper.rows import Row, released, rows
from cait.model.weights import load_weights
from cait.train.module import CaiTModule

NAMES = [f"n{index:02d}" for index in range(12)]
BROKEN = "ILSVRC2012_val_00000005.JPEG"
"""The validation picture that cannot be read."""
PART = (2, 5, 11)
"""The classes of a set that lacks the others."""
HERE = ["--trainer.accelerator=cpu", "--trainer.devices=1"]  # the tests' own process could not start others


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as ImageNet is laid out, in twelve classes (0 and 1 in negative too), and a run that has seen them."""
    place = tmp_path_factory.mktemp("evaluation")
    digits = load_digits()
    pictures = [(digit, pixels * 255 / 16) for digit, pixels in zip(digits.target, digits.images, strict=True)]
    pictures += [(digit + 10, 255 - pixels) for digit, pixels in pictures if digit < 2]
    order = np.random.default_rng(0).permutation(len(pictures))  # numbers do not follow the classes
    real: list[list[int]] = []
    for place_in_order, picture in enumerate(order):
        label, pixels = pictures[picture]
        number = place_in_order + 1
        if place_in_order < 301:  # over two processes 151 and 150
            path = place / "data" / "val" / NAMES[label] / f"ILSVRC2012_val_{number:08d}.JPEG"
            real.append([[], [int(label)], [int(label), (int(label) + 3) % 12]][number % 3])
        elif place_in_order < 500:
            path = place / "v2" / str(label) / f"{number}.jpeg"
        else:
            path = place / "data" / "train" / NAMES[label] / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.round().astype(np.uint8)).save(path, format="JPEG", quality=95)
        if path.name == BROKEN:
            path.write_bytes(b"no picture")
            real[-1] = []  # timm's evaluator knows of none
    (place / "real.json").write_text(json.dumps(real))
    for index in range(12):
        (place / "named").mkdir(exist_ok=True)
        (place / "named" / NAMES[index]).symlink_to(place / "v2" / str(index))
    for part in ("part", "c/fog/1", "c/fog/4", "c/noise/shot_noise/2"):
        for index in PART:
            (place / part).mkdir(parents=True, exist_ok=True)
            (place / part / NAMES[index]).symlink_to(place / "v2" / str(index))
    (place / "c/noise/shot_noise/5").symlink_to(place / "named")
    run = [*SMALL, *HERE, "--data.root=data", "--data.num_workers=0", "--trainer.max_epochs=2", "--run_name=mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        run += ["--trainer.limit_val_batches=9"]  # which evaluation does not heed
        main(["fit", *run, "--ema.decay=0.9", "--data.mixup=0", "--data.cutmix=0", "--data.eval_batch_size=32"])
    assert not (place / "logs/mine/evaluation.json").exists()  # training does not count this
    return place


@pytest.fixture(scope="module")
def evaluated(place: Path) -> dict:
    """What two processes find, in batches that the pictures do not fill."""
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--data.eval_batch_size=13"]
    further = ["--extra.part=part", "--extra.c=c", "--wanted_accuracy=0.25"]
    done = start(place, "eval", "mine", "--real=real.json", "--v2=v2", *further, *two)
    shown, _ = done.communicate(timeout=LIMIT)
    assert done.returncode == 0, shown
    return {"shown": shown, **json.loads((place / "logs/mine/evaluation.json").read_text())}


def logits_of(place: Path, weights: str, paths: list[Path], mirrored: bool = False) -> Tensor:
    """[len(paths), 12], a picture at a time, without a loader."""
    checkpoint = place / "logs/mine/checkpoints/best.ckpt"
    model = CaiTModule.load_from_checkpoint(checkpoint, map_location="cpu").model.eval()
    load_weights(model, checkpoint, ema=weights == "ema")
    transform = create_transform(16, interpolation="bicubic", crop_pct=1.0)
    with torch.no_grad():
        images = (transform(load_rgb(str(path)))[None] for path in paths)
        return torch.cat([model(image.flip(-1) if mirrored else image) for image in images])


@pytest.mark.parametrize("weights", ["raw", "ema"])
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
    # Class folders in the order of text, 0, 1, 10, 11, 2, ..., would have given others.
    as_text = sorted(range(12), key=str)
    assert not np.array_equal(expected, confusion_matrix([as_text.index(label) for label in labels], guesses))


def validation(place: Path) -> tuple[list[Path], Tensor]:
    """The images that can be read, and their labels."""
    paths = [path for path in sorted((place / "data/val").glob("*/*")) if path.name != BROKEN]
    return paths, torch.tensor([int(path.parent.name.removeprefix("n")) for path in paths])


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_how_far_to_trust_the_probabilities(place: Path, evaluated: dict, weights: str) -> None:
    figures = evaluated[weights]
    paths, labels = validation(place)
    probabilities = logits_of(place, weights, paths).softmax(dim=1)
    confidence, guesses = probabilities.max(dim=1)
    theirs = MulticlassCalibrationError(12, n_bins=15, norm="l1")(probabilities, labels)
    assert figures["calibration"]["ece"] == pytest.approx(100 * theirs.item(), abs=0.01)
    assert sum(each["images"] for each in figures["calibration"]["bins"]) == 300
    assert figures["acc1_macro"] == pytest.approx(100 * balanced_accuracy_score(labels, guesses))
    for row in figures["thresholds"]:
        answered = confidence >= row["threshold"]
        assert row["coverage"] == pytest.approx(100 * answered.float().mean().item())
        if answered.any():
            assert row["accuracy"] == pytest.approx(100 * (guesses == labels)[answered].float().mean().item())
    reached = figures["wanted_accuracy"]
    right = (guesses == labels)[confidence.argsort(descending=True)].float().cumsum(0) / torch.arange(1, 301)
    most = max((place + 1 for place in range(300) if right[place] >= 0.25), default=0)  # images that can be answered
    assert reached["coverage"] == pytest.approx(most / 3, abs=0.5)
    assert (reached["threshold"] is None) == (most == 0)
    assert most == 0 or reached["accuracy"] >= 25
    matrix = confusion_matrix(labels, guesses, labels=range(12))
    assert set(figures["never_predicted"]) == {NAMES[i] for i in range(12) if matrix[:, i].sum() == 0}
    np.fill_diagonal(matrix, 0)
    first = figures["confusions"][0]
    assert first["images"] == matrix.max() == matrix[NAMES.index(first["true"]), NAMES.index(first["predicted"])]
    assert [pair["images"] for pair in figures["confusions"]] == sorted(matrix[matrix > 0], reverse=True)[:20]
    with Image.open(place / "logs/mine/evaluation-reliability.png") as drawn:
        assert drawn.width > 500


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_a_set_of_some_classes_is_scored_among_them(place: Path, evaluated: dict, weights: str) -> None:
    paths = sorted(path for path in (place / "v2").glob("*/*") if int(path.parent.name) in PART)
    labels = torch.tensor([PART.index(int(path.parent.name)) for path in paths])
    logits = logits_of(place, weights, paths)[:, PART]  # as the authors of ImageNet-A and -R do
    acc1 = 100 * (logits.argmax(dim=1) == labels).float().mean().item()
    figures = evaluated[weights]["extra"]["part"]
    assert (figures["images"], figures["classes"]) == (len(paths), 3)
    assert figures["acc1"] == pytest.approx(acc1, rel=1e-5)
    assert figures["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
    # The same images, as if corrupted; and all classes, scored among all.
    corrupted = evaluated[weights]["extra"]["c"]
    whole = evaluated[weights]["v2"]["acc1"]
    assert corrupted["corruptions"].keys() == {"fog", "shot_noise"}
    assert corrupted["corruptions"]["fog"] == pytest.approx({"1": acc1, "4": acc1}, rel=1e-5)
    assert corrupted["corruptions"]["shot_noise"] == pytest.approx({"2": acc1, "5": whole}, rel=1e-5)
    assert corrupted["acc1"] == pytest.approx((acc1 + (acc1 + whole) / 2) / 2, rel=1e-5)
    assert corrupted["mce"] is None
    assert corrupted["images"] == 3 * len(paths) + 199


@pytest.mark.slow
def test_mirror_images_count_half(place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    main(["eval", "mine", "--data.num_workers=0", "--tta=hflip", "--output=mirrored/scores.json", "--v2=v2"])
    found = json.loads(Path("mirrored/scores.json").read_text())
    assert found["tta"] == "hflip"
    assert "at 16 pixels, crop 1.0, with mirror images" in capsys.readouterr().out
    paths, labels = validation(place)
    for weights in ("raw", "ema"):
        views = [logits_of(place, weights, paths, mirrored).softmax(dim=1) for mirrored in (False, True)]
        mean = (views[0] + views[1]) / 2
        acc1 = 100 * (mean.argmax(dim=1) == labels).float().mean().item()
        assert found[weights]["acc1"] == pytest.approx(acc1, rel=1e-5)
        loss, alone = (torch.nn.functional.nll_loss(each.log(), labels).item() for each in (mean, views[0]))
        assert found[weights]["loss"] == pytest.approx(loss, rel=1e-4)
        assert abs(found[weights]["loss"] - loss) < abs(found[weights]["loss"] - alone) / 3


def test_what_is_judged_is_the_mean_of_the_probabilities_among_the_classes_allowed() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 5))
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    plain, mirrored = (network(view).softmax(dim=1) for view in (images, images.flip(3)))
    evaluation = Evaluation(SimpleNamespace(), None, hflip=True)  # type: ignore[arg-type]
    network.register_forward_hook(evaluation._judge)
    assert torch.allclose(network(images).exp(), (plain + mirrored) / 2, atol=1e-6)
    evaluation.only = [1, 4]
    judged = network(images).softmax(dim=1)
    assert (judged[:, [0, 2, 3]] == 0).all()
    mean = (plain + mirrored)[:, [1, 4]]
    assert torch.allclose(judged[:, [1, 4]], mean / mean.sum(dim=1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_calibration_error_is_torchmetrics(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(7, (400,), generator=generator)
    logits = 3 * torch.randn(400, 7, generator=generator)
    logits[range(400), labels] += 2
    confidence, guesses = logits.softmax(dim=1).max(dim=1)
    found = calibration.calibration(confidence.numpy(), (guesses == labels).numpy())
    theirs = MulticlassCalibrationError(7, n_bins=calibration.BINS, norm="l1")(logits, labels)
    assert found["ece"] == pytest.approx(100 * theirs.item(), abs=1e-3)


def test_the_threshold_that_reaches_an_accuracy() -> None:
    confidence = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5], np.float32)
    right = np.array([True, True, False, True, True, False])
    for wanted, images in ((1.0, 1), (0.9, 1), (0.75, 5), (0.8, 5), (0.6, 6)):  # the two of 0.8 come together
        found = calibration.reach(confidence, right, wanted)
        assert (confidence >= found["threshold"]).sum() == images
        assert found["coverage"] == pytest.approx(100 * images / 6)
        assert found["accuracy"] >= 100 * wanted
    none = calibration.reach(confidence, ~right, 0.9)
    assert none == {"wanted": 90.0, "threshold": None, "coverage": 0.0, "accuracy": None}
    nothing = np.array([])
    assert calibration.reach(nothing, nothing.astype(bool), 0.9)["threshold"] is None
    assert calibration.calibration(nothing, nothing.astype(bool))["ece"] is None


def test_mean_corruption_error_is_alexnets_share() -> None:
    assert mce(ALEXNET) == pytest.approx(100)
    halved = {name: error / 2 for name, error in ALEXNET.items()} | {"speckle_noise": 99.0}  # one that is not counted
    assert mce(halved) == pytest.approx(50)
    assert mce(dict(list(ALEXNET.items())[:14])) is None


def test_class_folders_that_the_model_does_not_know(tmp_path: Path) -> None:
    for name in ("n00", "n77"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "1.jpeg")
    with pytest.raises(UserError, match=r"class folders that the model does not know: n77$"):
        open_extra(tmp_path, NAMES)


@pytest.mark.parametrize("weights", ["raw", "ema"])
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
    assert figures["acc1"] != pytest.approx(evaluated[weights]["acc1"])


def test_what_is_said_of_it(evaluated: dict) -> None:
    shown = evaluated["shown"]
    assert shown.count("by class, and the confusion matrix: logs/mine/evaluation.json") == 1  # one process speaks
    for line in (
        ("top-1", evaluated["raw"]["acc1"], evaluated["ema"]["acc1"]),
        ("ReaL top-1", evaluated["raw"]["real"]["acc1"], evaluated["ema"]["real"]["acc1"]),
        ("V2 top-5", evaluated["raw"]["v2"]["acc5"], evaluated["ema"]["v2"]["acc5"]),
    ):
        assert re.search(rf" {line[0]} +│ +{line[1]:.2f} % │ +{line[2]:.2f} % ", shown)
    about = {"weights": "logs/mine/checkpoints/best.ckpt", "model": "xxs24", "img_size": 16, "crop_pct": 1.0}
    about |= {"root": "data", "real": "real.json", "v2": "v2", "paper_row": None, "published": {}, "class_names": NAMES}
    assert about.items() <= evaluated.items()
    assert "val/acc1" not in shown  # Lightning's table has the same figures
    weakest = min((share, name) for name, share in evaluated["raw"]["per_class"].items())
    assert f"weakest classes: {weakest[1]} ({weakest[0]:.1f} %)" in shown
    unreached = evaluated["raw"]["wanted_accuracy"]["threshold"] is None
    words = ("for 25 % accuracy: answer from", "no probability is high enough: no answers are right 25 %")
    assert words[unreached] in shown
    assert f"never predicted: {', '.join(evaluated['raw']['never_predicted'][:1])}" in shown or (
        not evaluated["raw"]["never_predicted"]
    )
    assert evaluated["step"] == (evaluated["epoch"] + 1) * ((1797 + 360 - 500) // 64)


def imagenet() -> Files:
    """The names of ImageNet's validation pictures, in another order than their numbers."""
    return Files((f"val/ILSVRC2012_val_{1 + number * 7 % 50_000:08d}.JPEG", 0) for number in range(50_000))


def test_timms_copy_of_the_labels_is_used_for_imagenet() -> None:
    samples = imagenet()
    names = ImageNetInfo().label_names()
    data = SimpleNamespace(class_names=names, val_images=SimpleNamespace(samples=samples))
    labels = Evaluation(data, None)._real_labels()  # type: ignore[arg-type]
    assert labels is not None
    theirs, ours = RealLabelsImagenet([path for path, _ in samples]), RealAccuracy()
    generator = torch.Generator().manual_seed(0)
    for first in range(0, 50_000, 5_000):
        part = labels[first : first + 5_000]
        logits = torch.randn(5_000, 1000, generator=generator)
        # A boost that puts the first right class first, among five, or neither.
        boost = 6 * torch.rand(5_000, generator=generator) * (part[:, 0] >= 0)
        logits[torch.arange(5_000), part[:, 0].clamp(min=0)] += boost
        theirs.add_result(logits)
        ours.update(logits, part)
    figures = ours.compute()
    assert (figures["acc1"], figures["acc5"]) == pytest.approx((theirs.get_accuracy(1), theirs.get_accuracy(5)))
    assert 10 < figures["acc1"] < figures["acc5"] < 90
    assert figures["images"] == 50_000 - 3_163

    data.val_images.samples = Files(list(samples)[:100])  # a part of ImageNet is scored without ReaL
    assert Evaluation(data, None)._real_labels() is None  # type: ignore[arg-type]
    data.class_names = names[:10]  # and so is anything else
    assert Evaluation(data, None)._real_labels() is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "names", "words"),
    [
        (None, (1, 2), "real.json do not exist"),
        ("[[1], [", (1, 2), "real.json is not JSON"),
        ('{"a": [1]}', (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [10]]", (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [true]]", (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [2], [3]]", (1, 2), "has labels for 3 images, the validation set has 2"),
        ("[[1], [2]]", (1, 3), "00000003.JPEG is number 3, "),
        ("[[1], [2]]", (1, 1), "have one number"),
    ],
)
def test_labels_that_cannot_be_used(content: str | None, names: tuple, words: str, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        real_labels(str(path), Files((f"a/ILSVRC2012_val_{number:08d}.JPEG", 0) for number in names), 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--real=nowhere.json"], "nowhere.json do not exist"),
        (["--real=real.json", "--data.val_split=train"], "real.json has labels for 301 images"),
        (["--real=short.json", "--data.val_split=../v2-named"], "v2-named/n00/1.jpeg has none"),
        (["--v2=nowhere"], "nowhere does not exist"),
        (["--extra.a=nowhere"], "nowhere does not exist"),
        (["--extra.a=v2-short"], "v2-short holds class folders that the model does not know: 0, 1"),
        (["--wanted_accuracy=95"], "--wanted_accuracy is above 0 and at most 1, as 0.95; got 95"),
        (["--tta=vflip"], "tta"),
        (["--model.fields.in_chans=1"], "--model.fields.in_chans 1: images are read as RGB"),
        (["--data.background=whit"], "background must be a colour"),
        (["--v2=v2-short"], "v2-short holds 2 class folders, which are neither the model's 12 classes by name"),
        (["--output=data"], "data is a folder"),
        (["--trainer.limit_val_batches=0"], "limit_val_batches 0 scores nothing"),
    ],
)
def test_what_cannot_be_scored_is_told_in_one_line(
    arguments: list[str], words: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("v2-short/0", "v2-short/1"):
        (place / name).mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (place / "v2-named" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(place / "v2-named" / name / "1.jpeg")
    (place / "short.json").write_text(json.dumps([[]] * 12))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    with pytest.raises(SystemExit) as stop:
        main(["eval", "mine", "--data.num_workers=0", *arguments])
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    assert words in told[0]


def test_folders_with_the_classes_names_go_by_name(tmp_path: Path) -> None:
    names = sorted(str(index) for index in range(12))  # classes that are called by numbers, in the order of text
    for name in names:
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "1.jpeg")
    assert {Path(path).parent.name: label for path, label in scan_extra_val(tmp_path, names)} == {
        name: index for index, name in enumerate(names)
    }


def test_the_test_verb_scores_the_average_too(place: Path, evaluated: dict, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    run = ["--config=logs/mine/config.yaml", "--ckpt_path=logs/mine/checkpoints/best.ckpt", "--data.num_workers=0"]
    main(["test", *run])
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "acc1" in line]
    scored = {line[1].strip(): float(line[2]) for line in lines}
    expected = {"test/acc1": evaluated["raw"]["acc1"], "test_ema/acc1": evaluated["ema"]["acc1"]}
    assert scored == pytest.approx(expected, rel=1e-4)


# timm's results, written down once more: model and resolution, then ImageNet, ReaL and ImageNet-V2.
TIMM = {
    "xxs24-224": (78.400, 85.240, 67.29),
    "xxs36-224": (79.750, 86.323, 68.37),
    "xxs24-384": (80.954, 87.414, 70.55),
    "xxs36-384": (82.204, 88.161, 72.14),
    "s24-224": (83.484, 88.447, 73.01),
    "xs24-384": (84.064, 89.169, 74.11),
    "s24-384": (85.048, 89.510, 75.38),
    "s36-384": (85.458, 89.829, 76.01),
    "m36-384": (86.060, 90.049, 76.37),
    "m48-448": (86.480, 90.181, 76.84),
}


def test_timms_figures_stand_with_the_released_weights() -> None:
    listed = {row.name.removesuffix("-distilled"): tuple(row.timm.values()) for row in rows().values() if row.timm}
    assert listed == TIMM
    for id, (acc1, real, v2) in TIMM.items():
        name, img_size = id.split("-")
        row = released(name, int(img_size))
        assert row is not None
        assert row.settings["model.distillation"] == "hard"
        assert row.timm == {"acc1": acc1, "real": real, "v2": v2}
        assert abs(acc1 - row.published["paper"]["acc1"]) < 0.06  # the same weights, as the paper rounds them
    assert released("s36", 224) is None


def test_a_run_of_a_row_is_scored_beside_what_was_published(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    row = "models/s36-384-distilled"
    small = [
        *HERE,
        f"--data.root={digits_root}",
        "--data.img_size=16",
        "--data.batch_size=64",
        "--data.num_workers=0",
    ]
    fields = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
    small += [f"--model.fields.{name}={value}" for name, value in fields.items()]
    brief = ["--trainer.max_steps=1", "--model.warmup_epochs=0", "--model.distillation=none", "--run_name=mine"]
    main(["fit", "--paper", row, *small, *brief, "--model.weights=null"])
    capsys.readouterr()

    main(["eval", "mine", "--output=found/other.json"])
    other = json.loads(Path("found/other.json").read_text())
    assert (other["paper_row"], other["published"]) == (None, {})  # ten classes and another network are not the row's
    assert "85.4" not in capsys.readouterr().out

    monkeypatch.setattr(Row, "is_of", lambda *_: True)  # the row's own network is too large for a test
    published = {"paper": {"acc1": 85.4}, "timm": {"acc1": 85.458, "real": 89.829, "v2": 76.01}}
    main(["eval", "mine", "--v2", str(digits_root / "val"), "--output=found/mine.json"])  # the run knows its row
    shown = capsys.readouterr().out
    found = json.loads(Path("found/mine.json").read_text())
    assert (found["paper_row"], found["published"]) == (row, published)
    assert found["raw"]["v2"]["confusion"] == found["raw"]["confusion"]
    for title, *figures in (("top-1", "85.4 %", "85.458 %"), ("ReaL top-1", "89.829 %"), ("V2 top-1", "76.01 %")):
        line = next(line for line in shown.splitlines() if line.startswith(f"│ {title} "))
        assert [cell.strip() for cell in line.split("│")[-len(figures) - 1 : -1]] == figures

    # By the row's name the run is found in logs/, its average with it, and scored alike.
    Path("logs/mine").rename("logs/models-s36-384-distilled")
    main(["validate", "--paper", row, *small])
    again = json.loads(Path("logs/models-s36-384-distilled/evaluation.json").read_text())
    assert again["weights"] == "logs/models-s36-384-distilled/checkpoints/last.ckpt"
    assert again["published"] == published
    found["raw"].pop("v2"), found["ema"].pop("v2")
    assert (again["raw"], again["ema"]) == (found["raw"], found["ema"])
    # Weights from elsewhere are not the run's.
    weights = "--model.weights=logs/models-s36-384-distilled/checkpoints/last.ckpt"
    main(["validate", "--paper", row, *small, weights])
    other = json.loads(Path("evaluation.json").read_text())
    assert (other["raw"], other["step"], "ema" in other) == (found["raw"], None, False)


def test_timms_weights_are_scored_beside_timms_figures(
    tmp_path: Path, mixed_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr("cait.train.module.load_pretrained", lambda model, name: [])  # nothing is fetched
    recipe = ["--config", str(REPO / "configs/imagenet/xxs24_224.yaml"), *HERE, f"--data.root={mixed_root}"]
    main(["validate", *recipe, "--data.num_workers=0", "--trainer.precision=32-true", "--model.pretrained=true"])
    found = json.loads(Path("evaluation.json").read_text())
    assert (found["weights"], found["paper_row"]) == ("timm's xxs24", "models/xxs24-224-distilled")
    assert found["published"]["timm"] == {"acc1": 78.4, "real": 85.24, "v2": 67.29}
    assert found["raw"]["images"] == 15


def test_what_is_not_counted() -> None:
    counts = Counts(3)
    logits = torch.eye(3)[[0, 1, 1, 2]]
    counts.update(logits, torch.tensor([0, 0, 1, -1]), torch.tensor([[0, -1], [-1, -1], [0, 2], [2, -1]]))
    figures = counts.compute(["a", "b", "c"], with_real=True)
    assert figures["per_class"] == {"a": 50.0, "b": 100.0, "c": None}  # no picture, no accuracy
    assert (figures["images"], figures["confusion"][0]) == (3, [1, 1, 0])
    # Of the three that could be read the second has no right class.
    assert figures["real"] == {"acc1": 50.0, "acc5": 100.0, "images": 2}


def test_many_classes_are_counted_without_a_matrix(tmp_path: Path) -> None:
    classes = 100_000  # whose matrix would be 80 GB
    counts = Counts(classes)
    true, guessed = torch.tensor([7, 7, 99_999, 7, 0]), torch.tensor([7, 99_999, 99_999, 7, 5])
    logits = torch.zeros(5, classes)
    logits[range(5), guessed] = 1
    for part in (slice(0, 2), slice(2, 5)):
        counts.update(logits[part], true[part], None)
    counts.update(logits[:1], torch.tensor([-1]), None)
    figures = counts.compute([str(index) for index in range(classes)], with_real=False)
    assert figures["images"] == 5
    known = {name: share for name, share in figures["per_class"].items() if share is not None}
    assert known == pytest.approx({"0": 0.0, "7": 200 / 3, "99999": 100.0})
    path = tmp_path / "evaluation.json"
    write({"raw": figures, "ema": {"v2": figures}}, path)
    found = json.loads(path.read_text())
    assert found["raw"]["confusion"] == "evaluation-raw-confusion.npy"
    assert found["ema"]["v2"]["confusion"] == "evaluation-ema-v2-confusion.npy"
    assert found["raw"]["per_class"] == figures["per_class"]
    for parts in (found["raw"], found["ema"]["v2"]):
        rows = np.load(tmp_path / parts["confusion"])
        assert rows.tolist() == [[0, 5, 1], [7, 7, 2], [7, 99_999, 1], [99_999, 99_999, 1]]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("classes", [CLASSES_IN_JSON, CLASSES_IN_JSON + 1])
def test_the_list_of_counts_is_scikit_learns_matrix(classes: int) -> None:
    counts, generator = Counts(classes), torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(classes, (2, 500), generator=generator)
    guesses[::2] = labels[::2]
    counts.update(torch.nn.functional.one_hot(guesses, classes).float(), labels, None)
    figures = counts.compute([str(index) for index in range(classes)], with_real=False)
    expected = confusion_matrix(labels, guesses, labels=range(classes))
    if classes == CLASSES_IN_JSON:
        assert figures["confusion"] == expected.tolist()
    else:
        true, predicted, images = figures["confusion"].T
        assert np.array_equal(expected[true, predicted], images)
        assert images.sum() == expected.sum()
    assert [share is None for share in figures["per_class"].values()] == (expected.sum(axis=1) == 0).tolist()


def test_names_that_are_no_text_are_written_as_json_allows(tmp_path: Path) -> None:
    scores = {"per_class": {"\udcff": 1.0, "naïve": 2.0}}
    write(scores, tmp_path / "evaluation.json")
    text = (tmp_path / "evaluation.json").read_text(encoding="utf-8")
    assert json.loads(text) == scores
    assert "naïve" in text


def test_the_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evaluation.json"
    write({"first": 1}, path)

    def full(self: Path, text: str, **_: str) -> None:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write({"second": 2}, path)
    assert json.loads(path.read_text()) == {"first": 1}

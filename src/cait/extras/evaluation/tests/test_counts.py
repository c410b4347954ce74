"""The counts and what is worked out of them, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from timm.data import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet
from torchmetrics.classification import MulticlassCalibrationError

from cait.data.listing import Files
from cait.errors import UserError
from cait.extras.evaluation import calibration
from cait.extras.evaluation.counts import CLASSES_IN_MATRIX, Counts, RealAccuracy
from cait.extras.evaluation.extra_sets import ALEXNET, mce, open_extra, scan_extra_val
from cait.extras.evaluation.real_labels import real_labels
from cait.extras.evaluation.scorer import Evaluation
from cait.train.metrics import OneClass

NAMES = [f"n{index:02d}" for index in range(12)]


def evaluation(tta: str | None = None, **data: Any) -> Evaluation:
    """The callback, for a data module of these attributes and settings that ask for nothing else."""
    config = dict(real=None, v2=None, extra=None, tta=tta, wanted_accuracy=None)
    settings = SimpleNamespace(**config)
    module = SimpleNamespace(task=OneClass(len(data["class_names"])))
    scoring: Any = SimpleNamespace(config=settings, data=SimpleNamespace(source=None, **data), module=module)
    return Evaluation(scoring)


def test_what_is_judged_is_the_mean_of_the_probabilities_among_the_classes_allowed() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 5))
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    plain, mirrored = (network(view).softmax(dim=1) for view in (images, images.flip(3)))
    judge = evaluation("hflip", class_names=NAMES[:5])
    network.register_forward_hook(judge._judge)
    assert torch.allclose(network(images).exp(), (plain + mirrored) / 2, atol=1e-6)
    judge.only = [1, 4]
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


def imagenet() -> Files:
    """The names of ImageNet's validation pictures, in another order than their numbers."""
    return Files((f"val/ILSVRC2012_val_{1 + number * 7 % 50_000:08d}.JPEG", 0) for number in range(50_000))


def test_timms_copy_of_the_labels_is_used_for_imagenet() -> None:
    samples = imagenet()
    names = ImageNetInfo().label_names()
    labels = evaluation(class_names=names, val_images=SimpleNamespace(samples=samples))._real_labels()
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

    part_of_it = SimpleNamespace(samples=Files(list(samples)[:100]))  # is scored without ReaL
    assert evaluation(class_names=names, val_images=part_of_it)._real_labels() is None
    assert evaluation(class_names=names[:10], val_images=part_of_it)._real_labels() is None  # and so is anything else


@pytest.mark.parametrize(
    ("content", "names", "words"),
    [
        (None, (1, 2), "real.json do not exist"),
        ("[[1], [", (1, 2), "real.json is not JSON"),
        ('{"a": [1]}', (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [10]]", (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [true]]", (1, 2), "not a list of lists of class indices from 0 to 9"),
        ("[[1], [2], [3]]", (1, 2), "has labels for 3 images, the validation set has 2"),
        ("[[1], [2]]", (1, 3), "an image is number 3, "),
        ("[[1], [2]]", (1, 1), "have one number"),
    ],
)
def test_labels_that_cannot_be_used(content: str | None, names: tuple, words: str, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        real_labels(str(path), Files((f"a/ILSVRC2012_val_{number:08d}.JPEG", 0) for number in names), 10)


def test_folders_with_the_classes_names_go_by_name(tmp_path: Path) -> None:
    names = sorted(str(index) for index in range(12))  # classes that are called by numbers, in the order of text
    for name in names:
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "1.jpeg")
    assert {Path(path).parent.name: label for path, label in scan_extra_val(tmp_path, names)} == {
        name: index for index, name in enumerate(names)
    }


def test_what_is_not_counted() -> None:
    counts = Counts(3)
    logits = torch.eye(3)[[0, 1, 1, 2]]
    counts.update(logits, torch.tensor([0, 0, 1, -1]), torch.tensor([[0, -1], [-1, -1], [0, 2], [2, -1]]))
    figures = counts.compute(["a", "b", "c"], with_real=True)
    assert figures["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert figures["never_predicted"] == []  # the last has no picture
    # Of the three that could be read the second has no right class.
    assert figures["real"] == {"acc1": 50.0, "acc5": 100.0, "images": 2}


def test_images_whose_logits_are_not_finite_are_left_out_of_the_calibration() -> None:
    counts, clean = Counts(3), Counts(3)
    logits, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    clean.update(logits, labels, None)
    counts.update(torch.cat([logits, torch.full((2, 3), float("nan"))]), torch.cat([labels, labels[:2]]), None)
    names = ["a", "b", "c"]
    found, expected = counts.compute(names, with_real=False), clean.compute(names, with_real=False)
    for figure in ("calibration", "thresholds", "wanted_accuracy"):
        assert found[figure] == expected[figure]
    assert (np.sum(found["confusion"]), np.sum(expected["confusion"])) == (10, 8)  # they are counted all the same


def test_many_classes_are_counted_without_a_matrix() -> None:
    classes = 100_000  # whose matrix would be 80 GB
    counts = Counts(classes)
    true, guessed = torch.tensor([7, 7, 99_999, 7, 0]), torch.tensor([7, 99_999, 99_999, 7, 5])
    logits = torch.zeros(5, classes)
    logits[range(5), guessed] = 1
    for part in (slice(0, 2), slice(2, 5)):
        counts.update(logits[part], true[part], None)
    counts.update(logits[:1], torch.tensor([-1]), None)
    figures = counts.compute([str(index) for index in range(classes)], with_real=False)
    assert figures["confusion"] == [[0, 5, 1], [7, 7, 2], [7, 99_999, 1], [99_999, 99_999, 1]]


@pytest.mark.parametrize("classes", [CLASSES_IN_MATRIX, CLASSES_IN_MATRIX + 1])
def test_the_list_of_counts_is_scikit_learns_matrix(classes: int) -> None:
    counts, generator = Counts(classes), torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(classes, (2, 500), generator=generator)
    guesses[::2] = labels[::2]
    counts.update(torch.nn.functional.one_hot(guesses, classes).float(), labels, None)
    figures = counts.compute([str(index) for index in range(classes)], with_real=False)
    expected = confusion_matrix(labels, guesses, labels=range(classes))
    if classes == CLASSES_IN_MATRIX:
        assert figures["confusion"] == expected.tolist()
    else:
        true, predicted, images = np.array(figures["confusion"]).T
        assert np.array_equal(expected[true, predicted], images)
        assert images.sum() == expected.sum()

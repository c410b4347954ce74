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

from cait.data.listing import Files
from cait.errors import UserError
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


def counted(logits: torch.Tensor, labels: torch.Tensor, wanted: float | None = None) -> dict[str, Any]:
    counts, names = Counts(logits.shape[1], wanted), [str(index) for index in range(logits.shape[1])]
    for part in (slice(0, 2), slice(2, None)):
        counts.update(logits[part], labels[part], None)
    return counts.compute(names, with_real=False)


def test_the_threshold_that_reaches_an_accuracy() -> None:
    confidence = torch.tensor([0.9, 0.8, 0.8, 0.7, 0.6, 0.52])
    logits, labels = torch.stack([confidence, 1 - confidence], dim=1).log(), torch.tensor([0, 0, 1, 0, 0, 1])
    for wanted, images in ((1.0, 1), (0.9, 1), (0.75, 5), (0.8, 5)):  # the two of 0.8 come together
        found = counted(logits, labels, wanted)["wanted_accuracy"]
        assert found["coverage"] == pytest.approx(100 * images / 6)
        assert found["accuracy"] >= 100 * wanted
    none = counted(logits, 1 - labels, 0.9)["wanted_accuracy"]
    assert none == {"wanted": 90.0, "threshold": None, "coverage": 0.0, "accuracy": None}
    nothing = counted(logits, torch.full((6,), -1), 0.9)
    assert nothing["calibration"]["ece"] is None
    assert nothing["wanted_accuracy"]["threshold"] is None


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
    ("content", "numbers", "words"),
    [
        (None, (1, 2), "No such file"),
        ("[[1], [", (1, 2), "cannot use the ReaL labels"),
        ('[[1], ["a"]]', (1, 2), "cannot use the ReaL labels"),
        ("[[1], [2], [3]]", (1, 2), "has not one list for each of the 2 validation images"),
        ("[[1], [2]]", (1, 3), "has no image 'ILSVRC2012_val_00000003.JPEG'"),
    ],
)
def test_labels_that_cannot_be_used(content: str | None, numbers: tuple, words: str, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        real_labels(str(path), Files((f"a/ILSVRC2012_val_{number:08d}.JPEG", 0) for number in numbers))


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
    logits, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    expected = counted(logits, labels)
    found = counted(torch.cat([logits, torch.full((2, 3), float("nan"))]), torch.cat([labels, labels[:2]]))
    for figure in ("calibration", "thresholds", "wanted_accuracy"):
        assert found[figure] == expected[figure]
    assert (np.sum(found["confusion"]), np.sum(expected["confusion"])) == (10, 8)  # they are counted all the same


@pytest.mark.parametrize("classes", [CLASSES_IN_MATRIX, CLASSES_IN_MATRIX + 1])
def test_the_list_of_counts_is_scikit_learns_matrix(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(classes, (2, 500), generator=generator)
    guesses[::2] = labels[::2]
    figures = counted(torch.nn.functional.one_hot(guesses, classes).float(), labels)
    expected = confusion_matrix(labels, guesses, labels=range(classes))
    if classes == CLASSES_IN_MATRIX:
        assert figures["confusion"] == expected.tolist()
    else:
        true, predicted, images = np.array(figures["confusion"]).T
        assert np.array_equal(expected[true, predicted], images)
        assert images.sum() == expected.sum()

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
from cait.extras.evaluation.counts import CLASSES_IN_MATRIX, Counts
from cait.extras.evaluation.extra_sets import open_extra
from cait.extras.evaluation.real_labels import real_labels
from cait.extras.evaluation.scorer import Evaluation
from cait.train.metrics import OneClass

NAMES = [f"n{index:02d}" for index in range(12)]


def evaluation(tta: str | None = None, **data: Any) -> Evaluation:
    """The callback, for a data module of these attributes and settings that ask for nothing else."""
    settings = SimpleNamespace(real=None, v2=None, extra=None, tta=tta, wanted_accuracy=None)
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
    assert nothing["calibration"]["ece"] is nothing["wanted_accuracy"]["threshold"] is None


def test_timms_copy_of_the_labels_is_used_for_imagenet() -> None:
    paths = [f"val/ILSVRC2012_val_{1 + number * 7 % 50_000:08d}.JPEG" for number in range(50_000)]
    names = ImageNetInfo().label_names()
    samples = Files((path, 0) for path in paths)
    labels = evaluation(class_names=names, val_images=SimpleNamespace(samples=samples))._real_labels()
    theirs = RealLabelsImagenet(paths).real_labels
    assert [sorted({*row} - {-1}) for row in labels.tolist()] == [sorted(theirs[Path(path).name]) for path in paths]
    part_of_it = SimpleNamespace(samples=Files((path, 0) for path in paths[:100]))  # is scored without ReaL
    assert evaluation(class_names=names, val_images=part_of_it)._real_labels() is None
    assert evaluation(class_names=names[:10], val_images=part_of_it)._real_labels() is None  # and so is anything else


@pytest.mark.parametrize(
    ("content", "numbers", "words"),
    [
        (None, (1, 2), "No such file"),
        ("[[1], [", (1, 2), "JSONDecodeError"),
        ("[[1], [2], [3]]", (1, 2), "are not lists for the 2 validation images"),
        ("[[1], [2]]", (1, 3), "KeyError 'ILSVRC2012_val_00000003.JPEG'"),
    ],
)
def test_labels_that_cannot_be_used(content: str | None, numbers: tuple, words: str, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        real_labels(str(path), Files((f"a/ILSVRC2012_val_{number:08d}.JPEG", 0) for number in numbers))


def test_class_folders_go_by_name_or_else_by_index(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / str(index)).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / str(index) / "1.jpeg")
    as_text = sorted(str(index) for index in range(12))  # classes that are called by numbers, in the order of text
    for names in (as_text, NAMES):
        samples, only = open_extra(tmp_path, names)
        found = {Path(path).parent.name: label for path, label in samples}
        assert found == {str(index): as_text.index(str(index)) if names is as_text else index for index in range(12)}
        assert only is None
    assert open_extra(tmp_path, [*as_text, "x"]).only == [*range(12)]
    with pytest.raises(UserError, match=r"class folders that the model does not know: 10, 11"):
        open_extra(tmp_path, as_text[:2] + as_text[4:])
    with pytest.raises(UserError, match="nowhere does not exist"):
        open_extra(tmp_path / "nowhere", NAMES)


def test_what_is_not_counted() -> None:
    counts = Counts(3)
    logits = torch.eye(3)[[0, 1, 1, 2]]
    counts.update(logits, torch.tensor([0, 0, 1, -1]), torch.tensor([[0, -1], [-1, -1], [0, 2], [2, -1]]))
    figures = counts.compute(["a", "b", "c"], with_real=True)
    assert figures["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert figures["never_predicted"] == []  # the last has no picture
    # Of the three that could be read the second has no right class.
    assert figures["real"] == {"acc1": 50.0, "acc5": 100.0, "images": 2}

    logits, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    expected = counted(logits, labels)
    found = counted(torch.cat([logits, torch.full((2, 3), float("nan"))]), torch.cat([labels, labels[:2]]))
    for figure in ("calibration", "thresholds", "wanted_accuracy"):
        assert found[figure] == expected[figure]
    assert (np.sum(found["confusion"]), np.sum(expected["confusion"])) == (10, 8)  # they are counted all the same


def test_the_matrix_is_scikit_learns_and_is_left_out_where_it_is_too_large() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(CLASSES_IN_MATRIX, (2, 500), generator=generator)
    guesses[::2] = labels[::2]
    figures = counted(torch.nn.functional.one_hot(guesses, CLASSES_IN_MATRIX).float(), labels)
    assert figures["confusion"] == confusion_matrix(labels, guesses, labels=range(CLASSES_IN_MATRIX)).tolist()
    assert "confusion" not in counted(torch.eye(CLASSES_IN_MATRIX + 1)[:3], labels[:3])

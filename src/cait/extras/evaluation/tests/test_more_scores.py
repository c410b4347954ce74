"""What the extra counts, held against scikit-learn, torchmetrics and timm; further sets and ReaL."""

import functools
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import scored
import torch
from harness import call, parsed
from scored import BROKEN, NAMES, PART
from sklearn.metrics import confusion_matrix
from timm.data.real_labels import RealLabelsImagenet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassCalibrationError

from cait.data.table import Images
from cait.extras.evaluation import extra_sets, scorer
from cait.extras.evaluation.extra_sets import real_labels
from cait.extras.evaluation.scorer import CLASSES_IN_MATRIX, Counts, Evaluation
from cait.train.metrics import OneClass

WEIGHTS = pytest.mark.parametrize("weights", ["raw", "ema"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that has seen the digits, and further sets of them."""
    return scored.copied(tmp_path_factory)


@pytest.fixture(scope="module")
def evaluated(place):
    """The run's scores, as if the digits were ImageNet."""
    labels = partial(RealLabelsImagenet, real_json=place / "real.json")
    imagenet = SimpleNamespace(label_names=lambda: NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "ImageNetInfo", lambda: imagenet)
        patch.setattr(extra_sets, "RealLabelsImagenet", labels)
        words = "eval mine --data.num_workers=0 --extra.v2=v2 --extra.part=part"
        done = call(place, *words.split())
    assert done.returncode == 0, done.stderr
    scores = parsed(place / "logs/mine/evaluation.json")
    return scores | {"shown": done.stdout}


@functools.cache
def pictures(folder):
    """Those that can be read."""
    return [path for path in sorted(folder.glob("*/*")) if path.name != BROKEN]


@functools.cache
def predicted(place, weights, folder):
    """The labels [N] and the network's logits [N, 12] of a folder's pictures."""
    paths = pictures(place / folder)
    labels = [int(path.parent.name.removeprefix("n")) for path in paths]
    return torch.tensor(labels), scored.logits_of(place, weights, paths)


def assert_scores(figures, logits, labels):
    """The number of images, top-1 and loss are those of the logits."""
    assert figures["images"] == len(labels)
    right = 100 * (logits.argmax(dim=1) == labels).float().mean()
    assert figures["acc1"] == pytest.approx(right.item())
    assert figures["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-4)


@WEIGHTS
@pytest.mark.parametrize(("folder", "images"), [("data/val", 300), ("v2", 199)])
def test_counts_are_scikit_learns(folder, images, weights, place, evaluated):
    scores = evaluated[weights]
    figures = scores["extra"]["v2"] if folder == "v2" else scores
    labels, logits = predicted(place, weights, folder)
    assert len(labels) == images
    assert_scores(figures, logits, labels)
    expected = confusion_matrix(labels, logits.argmax(dim=1), labels=range(12))
    assert figures["confusion"] == expected.tolist()
    error = MulticlassCalibrationError(12, n_bins=15, norm="l1")(logits.softmax(dim=1), labels)
    assert figures["calibration"] == pytest.approx(100 * error.item(), abs=0.01)


@WEIGHTS
def test_a_set_of_some_classes_is_scored_among_them(weights, place, evaluated):
    labels, logits = predicted(place, weights, "v2")
    is_in_part = torch.isin(labels, torch.tensor(PART))
    right = torch.searchsorted(torch.tensor(PART), labels[is_in_part])
    # as the authors of ImageNet-A and -R do
    assert_scores(evaluated[weights]["extra"]["part"], logits[is_in_part][:, PART], right)


@WEIGHTS
def test_real_is_timms(weights, place, evaluated):
    paths = [str(path) for path in pictures(place / "data/val")]
    broken = next((place / "data/val").glob(f"*/{BROKEN}"))
    _, logits = predicted(place, weights, "data/val")
    theirs = RealLabelsImagenet([*paths, str(broken)], real_json=str(place / "real.json"))
    theirs.add_result(torch.cat([logits, torch.zeros(1, 12)]))
    figures = evaluated[weights]["real"]
    expected = (theirs.get_accuracy(1), theirs.get_accuracy(5))
    assert (figures["acc1"], figures["acc5"]) == pytest.approx(expected)
    assert figures["images"] == len(theirs.is_correct[1]) < 250


def test_what_is_said_of_it(evaluated):
    raw = evaluated["raw"]
    ema = evaluated["ema"]
    share, name = min((share, name) for name, share in raw["per_class"].items())
    assert f"weakest classes: {name} ({share:.1f} %)" in evaluated["shown"]
    for title, of_raw, of_ema in (
        ("calibration error", raw["calibration"], ema["calibration"]),
        ("ReaL top-1", raw["real"]["acc1"], ema["real"]["acc1"]),
        ("v2 top-5", raw["extra"]["v2"]["acc5"], ema["extra"]["v2"]["acc5"]),
    ):
        line = rf" {title} +│ +{of_raw:.2f} % │ +{of_ema:.2f} % "
        assert re.search(line, evaluated["shown"])
    assert evaluated["extra"] == {"part": "part", "v2": "v2"}


def test_timms_copy_of_the_labels_is_used_for_imagenet():
    paths = [f"val/ILSVRC2012_val_{number:08d}.JPEG" for number in range(50_000, 0, -1)]
    labels = real_labels(Images((path, 0) for path in paths))
    theirs = RealLabelsImagenet(paths).real_labels
    for number in range(0, 50_000, 97):
        right = theirs[Path(paths[number]).name]
        assert {*labels[number].tolist()} - {-1} == {*right}
    # a part is scored without ReaL
    assert real_labels(Images((path, 0) for path in paths[:100])) is None


def counted(logits, labels):
    """The scores of two batches."""
    counts = Counts(logits.shape[1])
    for part in (slice(0, 2), slice(2, None)):
        counts.update(logits[part], labels[part], None)
    return counts.compute(with_real=False)


def test_what_is_not_finite_and_what_has_no_label_is_not_counted():
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 3
    not_finite = torch.cat([logits, torch.full((2, 3), float("nan"))])
    assert counted(not_finite, torch.cat([labels, labels[:2]])) == counted(logits, labels)
    assert counted(logits, torch.full((8,), -1))["calibration"] is None
    assert "confusion" not in counted(torch.eye(CLASSES_IN_MATRIX + 1)[:3], labels[:3])


def test_a_loader_of_ones_own_is_scored():
    module = SimpleNamespace(
        model=torch.nn.Identity(), task=OneClass(2), num_classes=2, device=torch.device("cpu")
    )
    data = SimpleNamespace(source=None, class_names=["a", "b"], val_images=None)
    scoring = SimpleNamespace(data=data, module=module, config=SimpleNamespace(extra=None))
    evaluation = Evaluation(scoring)
    trainer = SimpleNamespace(callbacks=[], val_dataloaders=DataLoader([0, 1]))
    evaluation.on_validation_start(trainer, module)
    evaluation.on_validation_batch_end(trainer, module, torch.eye(2), (None, torch.tensor([0, 0])))
    evaluation.on_validation_end(trainer, module)
    assert evaluation.scores["raw"]["confusion"] == [[1, 1], [0, 0]]

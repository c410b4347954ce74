"""What the extra counts, held against scikit-learn, torchmetrics and timm; further sets and ReaL."""

import functools
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scored
import torch
from harness import call
from PIL import Image
from scored import BROKEN, NAMES, PART
from sklearn.metrics import confusion_matrix
from timm.data.real_labels import RealLabelsImagenet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassCalibrationError

from cait.data.table import Images
from cait.errors import UserError
from cait.extras.evaluation import extra_sets, scorer
from cait.extras.evaluation.extra_sets import open_extra, real_labels
from cait.extras.evaluation.scorer import CLASSES_IN_MATRIX, Counts, Evaluation

WEIGHTS = pytest.mark.parametrize("weights", ["raw", "ema"])
EVAL = ["eval", "mine", "--data.num_workers=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that has seen the digits, and further sets of them."""
    place = tmp_path_factory.mktemp("evaluation")
    scored.write_sets(place)
    scored.train(place)
    return place


@pytest.fixture(scope="module")
def evaluated(place):
    """The run's scores, as if the digits were ImageNet."""
    labels = partial(RealLabelsImagenet, real_json=place / "real.json")
    imagenet = SimpleNamespace(label_names=lambda: NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "ImageNetInfo", lambda: imagenet)
        patch.setattr(extra_sets, "RealLabelsImagenet", labels)
        done = call(place, *EVAL, "--extra.v2=v2", "--extra.part=part")
    assert done.returncode == 0, done.stderr
    return {"shown": done.stdout, **json.loads((place / "logs/mine/evaluation.json").read_text())}


@functools.cache
def pictures(folder):
    """Those that can be read."""
    return [path for path in sorted(folder.glob("*/*")) if path.name != BROKEN]


@functools.cache
def predicted(place, weights, folder):
    """The labels [N] and the network's logits [N, 12] of a folder's pictures."""
    paths = pictures(place / folder)
    labels = torch.tensor([int(path.parent.name.removeprefix("n")) for path in paths])
    return labels, scored.logits_of(place, weights, paths)


@WEIGHTS
@pytest.mark.parametrize(("folder", "images"), [("data/val", 300), ("v2", 199)])
def test_counts_are_scikit_learns(folder, images, weights, place, evaluated):
    scores = evaluated[weights]
    figures = scores["extra"]["v2"] if folder == "v2" else scores
    labels, logits = predicted(place, weights, folder)
    expected = confusion_matrix(labels, logits.argmax(dim=1), labels=range(12))
    assert figures["images"] == len(labels) == images
    assert figures["confusion"] == expected.tolist()
    assert figures["acc1"] == pytest.approx(100 * expected.trace() / images)
    assert figures["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-4)
    error = MulticlassCalibrationError(12, n_bins=15, norm="l1")(logits.softmax(dim=1), labels)
    assert figures["calibration"] == pytest.approx(100 * error.item(), abs=0.01)


@WEIGHTS
def test_a_set_of_some_classes_is_scored_among_them(weights, place, evaluated):
    labels, logits = predicted(place, weights, "v2")
    is_in_part = torch.isin(labels, torch.tensor(PART))
    # as the authors of ImageNet-A and -R do
    among = logits[is_in_part][:, PART]
    right = torch.tensor([PART.index(label) for label in labels[is_in_part].tolist()])
    figures = evaluated[weights]["extra"]["part"]
    assert figures["images"] == len(right)
    share = (among.argmax(dim=1) == right).float().mean().item()
    assert figures["acc1"] == pytest.approx(100 * share, rel=1e-5)
    assert figures["loss"] == pytest.approx(cross_entropy(among, right).item(), rel=1e-4)


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
    shown = evaluated["shown"]
    raw = evaluated["raw"]
    ema = evaluated["ema"]
    share, name = min((share, name) for name, share in raw["per_class"].items())
    assert f"weakest classes: {name} ({share:.1f} %)" in shown
    for title, of_raw, of_ema in (
        ("calibration error", raw["calibration"], ema["calibration"]),
        ("ReaL top-1", raw["real"]["acc1"], ema["real"]["acc1"]),
        ("v2 top-5", raw["extra"]["v2"]["acc5"], ema["extra"]["v2"]["acc5"]),
    ):
        assert re.search(rf" {title} +│ +{of_raw:.2f} % │ +{of_ema:.2f} % ", shown)
    assert evaluated["extra"] == {"part": "part", "v2": "v2"}


def test_timms_copy_of_the_labels_is_used_for_imagenet():
    paths = [f"val/ILSVRC2012_val_{1 + number * 7 % 50_000:08d}.JPEG" for number in range(50_000)]
    labels = real_labels(Images((path, 0) for path in paths))
    theirs = RealLabelsImagenet(paths).real_labels
    for number in range(0, 50_000, 97):
        found = {*labels[number].tolist()} - {-1}
        assert found == {*theirs[Path(paths[number]).name]}
    # a part is scored without ReaL
    assert real_labels(Images((path, 0) for path in paths[:100])) is None


def test_class_folders_go_by_name_or_else_by_index(tmp_path):
    numbers = sorted(str(index) for index in range(12))  # in the order of text
    for name in numbers:
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "1.jpeg")
    for names, label_of in ((numbers, numbers.index), (NAMES, int)):
        samples, only = open_extra(tmp_path, names)
        assert only is None
        for path, label in samples:
            assert label == label_of(Path(path).parent.name)
    assert open_extra(tmp_path, [*numbers, "x"]).only == [*range(12)]
    with pytest.raises(UserError, match="10, 11"):
        open_extra(tmp_path, numbers[:2] + numbers[4:])


def counted(logits, labels):
    """The scores of two batches."""
    counts = Counts(logits.shape[1])
    for part in (slice(0, 2), slice(2, None)):
        counts.update(logits[part], labels[part], None)
    return counts.compute(with_real=False)


def test_what_is_not_counted():
    counts = Counts(3)
    real = torch.tensor([[0, -1], [-1, -1], [0, 2], [2, -1]])
    counts.update(torch.eye(3)[[0, 1, 1, 2]], torch.tensor([0, 0, 1, -1]), real)
    figures = counts.compute(with_real=True)
    assert figures["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    # of the three that could be read the second has no right class
    assert figures["real"] == {"acc1": 50.0, "acc5": 100.0, "images": 2}

    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 3
    not_finite = torch.cat([logits, torch.full((2, 3), float("nan"))])
    assert counted(not_finite, torch.cat([labels, labels[:2]])) == counted(logits, labels)
    assert counted(logits, torch.full((8,), -1))["calibration"] is None
    assert "confusion" not in counted(torch.eye(CLASSES_IN_MATRIX + 1)[:3], labels[:3])


def test_a_loader_of_ones_own_is_scored():
    module: Any = SimpleNamespace(
        model=torch.nn.Identity(),
        task=SimpleNamespace(several=False),
        num_classes=2,
        device=torch.device("cpu"),
    )
    data = SimpleNamespace(source=None, class_names=["a", "b"], val_images=None)
    scoring: Any = SimpleNamespace(data=data, module=module, config=SimpleNamespace(extra=None))
    evaluation = Evaluation(scoring)
    trainer: Any = SimpleNamespace(callbacks=[], val_dataloaders=DataLoader([0, 1]))
    evaluation.on_validation_start(trainer, module)
    evaluation.on_validation_batch_end(trainer, module, torch.eye(2), (None, torch.tensor([0, 0])))
    evaluation.on_validation_end(trainer, module)
    assert evaluation.scores["raw"]["confusion"] == [[1, 1], [0, 0]]

"""What the extra counts, held against scikit-learn, torchmetrics and timm; further sets and ReaL."""

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
from scored import BROKEN, NAMES, PART, logits_of
from sklearn.metrics import balanced_accuracy_score, confusion_matrix
from timm.data.real_labels import RealLabelsImagenet
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassCalibrationError

from cait.data.table import Images
from cait.errors import UserError
from cait.extras.evaluation import extra_sets, scorer
from cait.extras.evaluation.extra_sets import open_extra, real_labels
from cait.extras.evaluation.scorer import CLASSES_IN_MATRIX, Counts, Evaluation

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
    """The run's scores, as if the digits were ImageNet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "ImageNetInfo", lambda: SimpleNamespace(label_names=lambda: NAMES))
        patch.setattr(
            extra_sets,
            "RealLabelsImagenet",
            partial(RealLabelsImagenet, real_json=place / "real.json"),
        )
        done = call(
            place, "eval", "mine", "--data.num_workers=0", "--extra.v2=v2", "--extra.part=part"
        )
    assert done.returncode == 0, done.stderr
    return {"shown": done.stdout, **json.loads((place / "logs/mine/evaluation.json").read_text())}


@WEIGHTS
@pytest.mark.parametrize("part", ["val", "v2"])
def test_counts_are_scikit_learns(place: Path, evaluated: dict, weights: str, part: str) -> None:
    figures = evaluated[weights] if part == "val" else evaluated[weights]["extra"]["v2"]
    paths = [
        path
        for path in (place / ("data/val" if part == "val" else "v2")).glob("*/*")
        if path.name != BROKEN
    ]
    labels = torch.tensor([int(path.parent.name.removeprefix("n")) for path in paths])
    logits = logits_of(place, weights, paths)
    expected = confusion_matrix(labels, logits.argmax(dim=1), labels=range(12))
    assert figures["confusion"] == expected.tolist()
    assert figures["images"] == len(paths) == (300 if part == "val" else 199)
    shares = 100 * expected.diagonal() / expected.sum(axis=1)
    assert figures["per_class"] == pytest.approx(dict(zip(NAMES, shares, strict=True)))
    assert figures["acc1_macro"] == pytest.approx(
        100 * balanced_accuracy_score(labels, logits.argmax(dim=1))
    )
    among_five = (logits.topk(5).indices == labels[:, None]).any(dim=1)
    assert figures["acc5"] == pytest.approx(100 * among_five.float().mean().item(), rel=1e-5)
    assert figures["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4
    )
    error = MulticlassCalibrationError(12, n_bins=15, norm="l1")(logits.softmax(dim=1), labels)
    assert figures["calibration"] == pytest.approx(100 * error.item(), abs=0.01)


@WEIGHTS
def test_a_set_of_some_classes_is_scored_among_them(
    place: Path, evaluated: dict, weights: str
) -> None:
    paths = sorted(path for path in (place / "v2").glob("*/*") if int(path.parent.name) in PART)
    labels = torch.tensor([PART.index(int(path.parent.name)) for path in paths])
    logits = logits_of(place, weights, paths)[:, PART]  # as the authors of ImageNet-A and -R do
    figures = evaluated[weights]["extra"]["part"]
    assert figures["images"] == len(paths)
    assert figures["acc1"] == pytest.approx(
        100 * (logits.argmax(dim=1) == labels).float().mean().item(), rel=1e-5
    )
    assert figures["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4
    )


@WEIGHTS
def test_real_is_timms(place: Path, evaluated: dict, weights: str) -> None:
    paths = sorted((place / "data/val").glob("*/*"))
    broken = next(path for path in paths if path.name == BROKEN)
    logits = logits_of(place, weights, [path for path in paths if path != broken])
    logits = torch.cat(
        [logits[: paths.index(broken)], torch.zeros(1, 12), logits[paths.index(broken) :]]
    )
    theirs = RealLabelsImagenet([str(path) for path in paths], real_json=str(place / "real.json"))
    theirs.add_result(logits)
    figures = evaluated[weights]["real"]
    assert (figures["acc1"], figures["acc5"]) == pytest.approx(
        (theirs.get_accuracy(1), theirs.get_accuracy(5))
    )
    assert figures["images"] == len(theirs.is_correct[1]) < 250


def test_what_is_said_of_it(evaluated: dict) -> None:
    shown, raw, ema = evaluated["shown"], evaluated["raw"], evaluated["ema"]
    share, name = min((share, name) for name, share in raw["per_class"].items())
    assert f"weakest classes: {name} ({share:.1f} %)" in shown
    for line in (
        ("calibration error", raw["calibration"], ema["calibration"]),
        ("ReaL top-1", raw["real"]["acc1"], ema["real"]["acc1"]),
        ("v2 top-5", raw["extra"]["v2"]["acc5"], ema["extra"]["v2"]["acc5"]),
    ):
        assert re.search(rf" {line[0]} +│ +{line[1]:.2f} % │ +{line[2]:.2f} % ", shown)
    assert evaluated["extra"] == {"part": "part", "v2": "v2"}


def test_a_set_that_cannot_be_scored_is_told_in_one_line(place: Path) -> None:
    done = call(place, "eval", "mine", "--data.num_workers=0", "--extra.a=nowhere")
    assert done.returncode == 2
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("cait: error:")]
    assert "nowhere does not exist" in told


def test_timms_copy_of_the_labels_is_used_for_imagenet() -> None:
    paths = [f"val/ILSVRC2012_val_{1 + number * 7 % 50_000:08d}.JPEG" for number in range(50_000)]
    labels = real_labels(Images((path, 0) for path in paths))
    theirs = RealLabelsImagenet(paths).real_labels
    assert [sorted({*row} - {-1}) for row in labels.tolist()] == [
        sorted(theirs[Path(path).name]) for path in paths
    ]
    # a part is scored without ReaL
    assert real_labels(Images((path, 0) for path in paths[:100])) is None


def test_class_folders_go_by_name_or_else_by_index(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / str(index)).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / str(index) / "1.jpeg")
    # classes that are called by numbers, in the order of text
    as_text = sorted(str(index) for index in range(12))
    for names in (as_text, NAMES):
        samples, only = open_extra(tmp_path, names)
        found = {Path(path).parent.name: label for path, label in samples}
        assert found == {
            str(index): as_text.index(str(index)) if names is as_text else index
            for index in range(12)
        }
        assert only is None
    assert open_extra(tmp_path, [*as_text, "x"]).only == [*range(12)]
    with pytest.raises(UserError, match=r"class folders that the model does not know: 10, 11"):
        open_extra(tmp_path, as_text[:2] + as_text[4:])


def counted(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    counts = Counts(logits.shape[1])
    for part in (slice(0, 2), slice(2, None)):
        counts.update(logits[part], labels[part], None)
    return counts.compute(with_real=False)


def test_what_is_not_counted() -> None:
    counts = Counts(3)
    logits = torch.eye(3)[[0, 1, 1, 2]]
    counts.update(
        logits, torch.tensor([0, 0, 1, -1]), torch.tensor([[0, -1], [-1, -1], [0, 2], [2, -1]])
    )
    figures = counts.compute(with_real=True)
    assert figures["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    # Of the three that could be read the second has no right class.
    assert figures["real"] == {"acc1": 50.0, "acc5": 100.0, "images": 2}

    logits, labels = (
        torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(8) % 3,
    )
    expected = counted(logits, labels)
    found = counted(
        torch.cat([logits, torch.full((2, 3), float("nan"))]), torch.cat([labels, labels[:2]])
    )
    assert found == expected
    assert counted(logits, torch.full((8,), -1))["calibration"] is None
    assert "confusion" not in counted(torch.eye(CLASSES_IN_MATRIX + 1)[:3], labels[:3])


def test_a_loader_of_ones_own_is_scored() -> None:
    task = SimpleNamespace(several=False)
    module: Any = SimpleNamespace(
        model=torch.nn.Identity(), task=task, num_classes=2, device=torch.device("cpu")
    )
    data = SimpleNamespace(source=None, class_names=["a", "b"], val_images=None)
    evaluation = Evaluation(
        SimpleNamespace(data=data, module=module, config=SimpleNamespace(extra=None))
    )  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(callbacks=[], val_dataloaders=DataLoader([0, 1]))
    evaluation.on_validation_start(trainer, module)
    evaluation.on_validation_batch_end(trainer, module, torch.eye(2), (None, torch.tensor([0, 0])))
    evaluation.on_validation_end(trainer, module)
    assert evaluation.scores["raw"]["confusion"] == [[1, 1], [0, 0]]

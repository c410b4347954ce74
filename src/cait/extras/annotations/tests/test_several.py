"""Several labels an image, held against scikit-learn, torch and timm."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import MultiLabelBinarizer
from timm.data import Mixup
from torch import Tensor

from cait.data.datamodule import ImageNetDataModule
from cait.data.source import open_source
from cait.data.transforms import Mixing
from cait.extras.annotations.several import MultiLabel, MultiLabelLoss, best_thresholds
from cait.train.losses import LossSettings
from cait.train.module import CaiTModule

OF_DIGITS = {"even": "02468", "prime": "2357", "round": "03689", "big": "789"}


@pytest.fixture
def several(here: Path) -> list[dict[str, str]]:
    """The rows of a table of the digits and what is true of each: four classes, none of them for a 1."""
    root, rows = Path("data/digits"), []
    for path in sorted(root.glob("*/*/*.png")):
        found = [name for name, digits in OF_DIGITS.items() if path.parent.name in digits]
        rows.append({"path": str(path.relative_to(root)), "label": " ; ".join(found) or ";"})
    with open("several.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["path", "label"])
        table.writeheader()
        table.writerows(rows)
    return rows


def binarized(rows: list[dict[str, str]]) -> tuple[np.ndarray, list[str]]:
    """scikit-learn's rows of 0 and 1, and the names of the classes."""
    binarizer = MultiLabelBinarizer()
    found = binarizer.fit_transform([{*row["label"].replace(" ", "").split(";")} - {""} for row in rows])
    return found, [str(name) for name in binarizer.classes_]


def test_the_labels_of_images_are_scikit_learns(several: list[dict[str, str]]) -> None:
    data = ImageNetDataModule(root="data/digits", labels="several.csv", multi_label=True, img_size=16, num_workers=0)
    rows, names = binarized(several)
    expected = {f"data/digits/{row['path']}": truth for row, truth in zip(several, rows, strict=True)}
    assert data.class_names == names
    data.setup("fit")
    for files, loader in ((data.source.val, data.val_dataloader()), (data.source.train, None)):
        truth = np.stack([expected[path] for path, _ in files])
        if loader is None:
            assert data.class_counts() == truth.sum(axis=0).tolist()
        else:
            assert torch.cat([labels for _, labels in loader]).tolist() == truth.tolist()
    _, labels = next(iter(data.train_dataloader()))
    assert labels.shape == (128, 4)
    assert labels.dtype == torch.float32


def test_folds_are_scikit_learns_by_the_set_of_labels(several: list[dict[str, str]]) -> None:
    fold = 2
    text = Path("several.csv").read_text().splitlines()
    text[1] = text[1].split(",")[0] + ",even;prime;round;big"  # one image alone
    Path("several.csv").write_text("\n".join(text))
    source = open_source("data/digits", labels="several.csv", multi_label=True, folds=3, fold=fold)
    with open("several.csv", newline="") as lines:
        rows = [
            (row["path"], ";".join(sorted(row["label"].replace(" ", "").split(";")))) for row in csv.DictReader(lines)
        ]
    labels = np.unique([label for _, label in rows], return_inverse=True)[1]
    labels = np.where(np.bincount(labels)[labels] < 3, -1, labels)
    train, val = [*StratifiedKFold(3, shuffle=True, random_state=0).split(labels, labels)][fold]
    assert [path.removeprefix("data/digits/") for path, _ in source.val] == [rows[i][0] for i in val]
    assert [path.removeprefix("data/digits/") for path, _ in source.train] == [rows[i][0] for i in train]


def answers(images: int = 200, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Logits, with ties, and targets; no image has the last class."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(images, classes, generator=generator) < 0.3).float()
    targets[:, -1] = 0
    return (2 * targets + torch.randn(images, classes, generator=generator) - 1).mul(8).round() / 8, targets


def test_the_metrics_are_scikit_learns() -> None:
    logits, targets = answers()
    task = MultiLabel(6)
    metrics = task.metrics({"lrap": "torchmetrics.classification:MultilabelRankingAveragePrecision"}, True)
    unread = torch.full((1, 6), -1.0)
    for start in range(0, 200, 64):
        batch = targets[start : start + 64]
        metrics.update(torch.cat([logits[start : start + 64], unread]), torch.cat([batch, unread]))
    found = metrics.compute("val")
    truth, probabilities = targets.numpy(), logits.sigmoid().numpy()
    hits = probabilities >= 0.5
    assert found["val/mAP"] == pytest.approx(average_precision_score(truth[:, :5], probabilities[:, :5]), abs=1e-6)
    assert found["val/f1"] == pytest.approx(f1_score(truth, hits, average="macro", zero_division=0), abs=1e-6)
    assert found["val/loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item(), abs=1e-6)
    some = truth.any(axis=1)
    first = truth[np.arange(200), logits.topk(1).indices[:, 0].numpy()]
    assert found["val/acc1"] == pytest.approx(100 * first[some].mean(), abs=1e-4)
    assert 0 < found["val/lrap"] < 1  # a metric of the user's own
    scores = metrics.by_class(list("abcdef"))
    assert scores["images"] == 200
    assert scores["multi_label"]["average_precision"]["f"] is None
    assert scores["per_class"]["a"] == pytest.approx(100 * hits[truth[:, 0] == 1, 0].mean())


def test_the_thresholds_have_the_highest_f1_that_there_is() -> None:
    logits, targets = answers()
    probabilities = logits.sigmoid()
    chosen = best_thresholds(probabilities, targets)
    assert chosen[-1] == 0.5  # nothing is known of a class without an image
    for index in range(5):
        precision, recall, _ = precision_recall_curve(targets[:, index], probabilities[:, index])
        highest = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
        assert f1_score(targets[:, index], probabilities[:, index] >= chosen[index]) == pytest.approx(highest)
        assert not (probabilities[:, index] == chosen[index]).any()  # between two of them


def test_thresholds_are_chosen_in_training_alone_and_travel_with_the_weights() -> None:
    module = CaiTModule(
        img_size=16, num_classes=6, name="xxs24", fields={"depth": 1, "patch_size": 8}, task="multi_label"
    )
    logits, targets = answers()
    for prefix in ("val", "val_ema"):
        module.val_metrics.update(logits if prefix == "val" else -logits, targets)
        module.val_metrics.compute(prefix)
    assert module.task.thresholds.unique().tolist() == [0.5]
    module.task.trains = True
    for prefix in ("val", "val_ema"):
        module.val_metrics.update(logits if prefix == "val" else -logits, targets)
        module.val_metrics.compute(prefix)
    state = module.state_dict()
    assert torch.equal(state["task.val"], best_thresholds(logits.sigmoid(), targets))
    assert torch.equal(state["task.val_ema"], best_thresholds((-logits).sigmoid(), targets))
    module.task.averaged = True
    assert torch.equal(module.task.thresholds, state["task.val_ema"])
    assert "task.val" not in CaiTModule(img_size=16, num_classes=6, fields={"depth": 1, "patch_size": 8}).state_dict()


def test_predictions_are_all_classes_from_their_thresholds_on() -> None:
    task = MultiLabel(3)
    task.val.copy_(torch.tensor([0.5, 0.2, 0.9]))
    found = task.best(torch.tensor([[0.5, 0.7, 0.89], [0.1, 0.1, 0.1]]), ["a", "b", "c"])
    assert [[one["class"] for one in image] for image in found] == [["b", "a"], []]
    assert [len(image) for image in task.best(torch.ones(1, 3), ["a", "b", "c"], 2)] == [2]


def test_the_loss_is_torchs_with_smoothing_and_weights() -> None:
    logits, targets = answers()
    counts = targets.sum(dim=0)
    smoothed = 0.9 * targets + 0.05
    plain = F.binary_cross_entropy(logits.double().sigmoid(), smoothed.double()).item()
    assert MultiLabelLoss(0.1)(logits, targets).item() == pytest.approx(plain, abs=1e-6)
    weights = (200 - counts) / counts.clamp(min=1)
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)
    expected = -(weights * smoothed * log_p + (1 - smoothed) * log_q).mean().item()

    class Data:
        source = type("Source", (), {"train": range(200)})

        def class_counts(self) -> list[int]:
            return counts.long().tolist()

    loss = MultiLabel(6).loss(LossSettings(class_weights="balanced"), Data())
    assert loss(logits, targets).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("mode", "switch"), [("batch", 0.0), ("pair", 1.0), ("elem", 0.0), ("elem", 1.0)])
def test_labels_are_mixed_in_timms_shares(mode: str, switch: float) -> None:
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 1, 2, 3, 3, 1, 0, 2])
    rows = F.one_hot(classes, 4).float()
    mixing = Mixing(mix_mode=mode, mix_switch_prob=switch)  # type: ignore[arg-type]
    mixed, shares = mixing(images.clone(), rows, 4, seed=3)
    np.random.seed(3)
    timms = Mixup(0.8, 1.0, switch_prob=switch, mode=mode, label_smoothing=0.0, num_classes=4)
    expected, timms_shares = timms(images.clone(), classes)
    assert torch.equal(mixed, expected)
    assert torch.allclose(shares, timms_shares, atol=1e-6)
    both = rows + F.one_hot((classes + 1) % 4, 4)  # two labels an image: the shares of each add up
    summed = mixing(images.clone(), both, 4, seed=3)[1]
    assert torch.allclose(summed, shares + shares.roll(1, dims=1), atol=1e-6)

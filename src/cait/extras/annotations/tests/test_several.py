"""Several labels an image, held against scikit-learn, torch and timm."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import loader, module, trainer
from sklearn.metrics import average_precision_score, f1_score
from sklearn.preprocessing import MultiLabelBinarizer
from timm.data import Mixup
from torch import Tensor

from cait.data.datamodule import ImageNetDataModule
from cait.data.transforms import Mixing
from cait.errors import UserError
from cait.extras.annotations.several import MultiLabel, MultiLabelLoss
from cait.train.losses import LossSettings

OF_DIGITS = {"even": "02468", "prime": "2357", "round": "03689", "big": "789"}
"""Four classes, none of them for a 1."""


def test_the_labels_of_images_are_scikit_learns(here: Path) -> None:
    root, rows = Path("data/digits"), []
    for path in sorted(root.glob("*/*/*.png")):
        found = [name for name, digits in OF_DIGITS.items() if path.parent.name in digits]
        rows.append((str(path.relative_to(root)), " ; ".join(found) or ";"))
    with open("several.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    data = ImageNetDataModule(root="data/digits", labels="several.csv", multi_label=True, img_size=16, num_workers=0)
    binarizer = MultiLabelBinarizer()
    truth = binarizer.fit_transform([{*label.replace(" ", "").split(";")} - {""} for _, label in rows])
    expected = {f"data/digits/{path}": row for (path, _), row in zip(rows, truth, strict=True)}
    assert data.class_names == [*binarizer.classes_]
    data.setup("fit")
    of_val = [expected[path].tolist() for path, _ in data.source.val]
    assert torch.cat([labels for _, labels in data.val_dataloader()]).tolist() == of_val
    assert data.class_counts() == sum(expected[path] for path, _ in data.source.train).tolist()
    _, labels = next(iter(data.train_dataloader()))
    assert labels.shape == (128, 4)
    assert labels.dtype == torch.float32


def answers(images: int = 200, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Logits, with ties, and targets; no image has the last class."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(images, classes, generator=generator) < 0.3).float()
    targets[:, -1] = 0
    return (2 * targets + torch.randn(images, classes, generator=generator) - 1).mul(8).round() / 8, targets


def test_the_metrics_are_scikit_learns() -> None:
    logits, targets = answers()
    metrics = MultiLabel(6).metrics({"lrap": "torchmetrics.classification:MultilabelRankingAveragePrecision"}, True)
    unread = torch.full((1, 6), -1.0)
    for start in range(0, 200, 64):
        batch = targets[start : start + 64]
        metrics.update(torch.cat([logits[start : start + 64], unread]), torch.cat([batch, unread]))
    found = metrics.compute("val")
    truth, probabilities = targets.numpy(), logits.sigmoid().numpy()
    hits = probabilities > 0.5
    assert found["val/mAP"] == pytest.approx(average_precision_score(truth[:, :5], probabilities[:, :5]), abs=1e-6)
    assert found["val/f1"] == pytest.approx(f1_score(truth, hits, average="macro", zero_division=0), abs=1e-6)
    assert found["val/loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item(), abs=1e-6)
    assert 0 < found["val/lrap"] < 1  # a metric of the user's own
    scores = metrics.by_class(list("abcdef"))
    assert scores["images"] == 200
    assert scores["per_class"]["f"] is None
    assert scores["per_class"]["a"] == pytest.approx(100 * hits[truth[:, 0] == 1, 0].mean())


def test_predictions_are_all_classes_above_a_half() -> None:
    task, probabilities = MultiLabel(3), torch.tensor([[0.6, 0.7, 0.4], [0.1, 0.5, 0.1]])
    found = task.best(probabilities, ["a", "b", "c"])
    assert [[one["class"] for one in image] for image in found] == [["b", "a"], []]
    assert [len(image) for image in task.best(probabilities, ["a", "b", "c"], 1)] == [1, 0]


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

    task = MultiLabel(6)
    loss = task.loss(LossSettings(class_weights="balanced"), Data())
    assert loss(logits, targets).item() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="distillation is for images of one class each"):
        trainer().fit(module(task="multi_label", distillation="hard"), loader())


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

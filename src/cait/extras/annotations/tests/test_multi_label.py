"""Several labels per image: labels, loss, metrics and mixing held against scikit-learn, torch and timm."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import over_table
from label_tables import write_table
from modules import images_in
from same import same
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    label_ranking_average_precision_score,
    recall_score,
)
from sklearn.preprocessing import MultiLabelBinarizer

from cait.data.transforms import Mixing
from cait.extras.annotations.multi_label import MultiLabel
from cait.train.losses import LossSettings

OF_DIGITS = {"even": "02468", "prime": "2357", "round": "03689", "big": "789"}
"""Four classes, none of them for a 1."""


def names_of(path):
    digit = Path(path).parent.name
    return [name for name, digits in OF_DIGITS.items() if digit in digits]


def test_the_labels_of_images_are_scikit_learns(digits_root, tmp_path):
    paths = [*digits_root.glob("val/*/*.png")]
    write_table(
        tmp_path / "t.csv", "path,label", paths, [";".join(names_of(p)) or ";" for p in paths]
    )
    data = images_in(digits_root, labels=str(tmp_path / "t.csv"), multi_label=True, img_size=16)
    data.setup("fit")
    assert data.class_names == sorted(OF_DIGITS)
    binarizer = MultiLabelBinarizer(classes=data.class_names)
    train, val = (
        torch.from_numpy(binarizer.fit_transform([names_of(path) for path, _ in images])).float()
        for images in (data.source.train, data.source.val)
    )
    assert same(torch.cat([labels for _, labels in data.val_dataloader()]), val)
    assert data.class_counts() == train.sum(dim=0).tolist()


def answers(classes):
    """Logits of 200 images, with ties, and targets; no image has the last class."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(200, classes, generator=generator) < 0.3).float()
    targets[:, -1] = 0
    logits = 2 * targets + torch.randn(200, classes, generator=generator) - 1
    return (8 * logits).round() / 8, targets


def test_the_metrics_are_scikit_learns(recwarn):
    logits, targets = answers(6)
    own = {"lrap": "torchmetrics.classification:MultilabelRankingAveragePrecision"}
    metrics = MultiLabel(6).metrics(own, True)
    unread = torch.full((1, 6), -1.0)
    for batch, labels in zip(logits.split(64), targets.split(64), strict=True):
        metrics.update(torch.cat([batch, unread]), torch.cat([labels, unread]))
    scores = metrics.compute("val")
    assert not recwarn.list  # a class without an image is nothing to warn of
    truth, probabilities = targets.numpy(), logits.sigmoid().numpy()
    hits = probabilities > 0.5
    expected = {
        "val/mAP": average_precision_score(truth[:, :5], probabilities[:, :5]),
        "val/f1": f1_score(truth, hits, average="macro", zero_division=0),
        "val/loss": F.binary_cross_entropy_with_logits(logits, targets).item(),
        "val/lrap": label_ranking_average_precision_score(truth, probabilities),
    }
    assert {name: float(scores[name]) for name in expected} == pytest.approx(expected, abs=1e-6)
    by_class = metrics.by_class("abcdef")
    assert by_class["images"] == 200
    recalls = 100 * recall_score(truth[:, :5], hits[:, :5], average=None)
    shares = dict(zip("abcde", recalls, strict=True))
    assert by_class["per_class"] == pytest.approx(shares | {"f": None})


# The loss


@pytest.mark.parametrize("counts", [None, [200, 50, 0]])
def test_classes_of_few_images_weigh_more_in_the_loss_if_there_are_data(counts):
    """Of a class on every image, or on none, nothing is known."""
    source = SimpleNamespace(train=range(200))
    data = SimpleNamespace(source=source, class_counts=lambda: counts)
    settings = LossSettings(class_weights="balanced")
    loss = MultiLabel(3).loss(settings, data if counts else None)
    logits, targets = answers(3)
    smoothed = 0.9 * targets + 0.05
    weights = torch.tensor([1, 3, 1]) if counts else 1
    positive = weights * smoothed * F.logsigmoid(logits)
    negative = (1 - smoothed) * F.logsigmoid(-logits)
    torch.testing.assert_close(loss(logits, targets), -(positive + negative).mean())


# Mixup and CutMix


@over_table(__file__, "mixing")
def test_labels_are_mixed_in_the_shares_of_one_label_per_image(mode, switch):
    """Which are timm's."""
    images = torch.rand(8, 3, 16, 16)
    classes = torch.tensor([0, 1, 2, 3, 3, 1, 0, 2])
    labels = F.one_hot(classes, 4).float()
    mixing = Mixing(mix_mode=mode, mix_switch_prob=switch)

    def mixed(targets):
        return mixing.mix(images.clone(), targets, 4, seed=3)

    of_classes, shares = mixed(classes)
    of_labels, shares_of_labels = mixed(labels)
    assert torch.equal(of_labels, of_classes)
    torch.testing.assert_close(shares_of_labels, shares)
    _, sums = mixed(labels + labels.roll(1, dims=1))  # of two labels, whose shares add up
    torch.testing.assert_close(sums, shares + shares.roll(1, dims=1))

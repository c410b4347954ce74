"""Several labels per image: labels, loss, metrics and mixing held against scikit-learn, torch and timm."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from label_tables import write_table
from modules import images_in, loader, module, trainer
from same import same
from sklearn.metrics import average_precision_score, f1_score
from sklearn.preprocessing import MultiLabelBinarizer

from cait.data.transforms import Mixing
from cait.errors import UserError
from cait.extras.annotations.multi_label import MultiLabel, MultiLabelLoss
from cait.train.losses import LossSettings

OF_DIGITS = {"even": "02468", "prime": "2357", "round": "03689", "big": "789"}
"""Four classes, none of them for a 1."""


def names_of(path):
    digit = Path(path).parent.name
    return [name for name, digits in OF_DIGITS.items() if digit in digits]


def test_the_labels_of_images_are_scikit_learns(digits_root, tmp_path):
    paths = [str(path) for path in digits_root.glob("val/*/*.png")]
    rows = [(path, " ; ".join(names_of(path)) or ";") for path in paths]
    table = write_table(tmp_path / "t.csv", "path,label", rows)
    data = images_in(digits_root, labels=table, multi_label=True, img_size=16)
    data.setup("fit")
    binarizer = MultiLabelBinarizer(classes=data.class_names)
    assert data.class_names == sorted(OF_DIGITS)

    def expected(images):
        names = [names_of(path) for path, _ in images]
        return torch.from_numpy(binarizer.fit_transform(names)).float()

    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert same(labels, expected(data.source.val))
    assert data.class_counts() == expected(data.source.train).sum(dim=0).tolist()
    _, labels = next(iter(data.train_dataloader()))
    assert labels.shape == (4, 4)
    assert labels.dtype == torch.float32


def answers():
    """Logits of 200 images and 6 classes, with ties, and targets; no image has the last class."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(200, 6, generator=generator) < 0.3).float()
    targets[:, -1] = 0
    logits = 2 * targets + torch.randn(200, 6, generator=generator) - 1
    return (8 * logits).round() / 8, targets


def test_the_metrics_are_scikit_learns(recwarn):
    logits, targets = answers()
    own = {"lrap": "torchmetrics.classification:MultilabelRankingAveragePrecision"}
    metrics = MultiLabel(6).metrics(own, True)
    unread = torch.full((1, 6), -1.0)
    for batch, labels in zip(logits.split(64), targets.split(64), strict=True):
        metrics.update(torch.cat([batch, unread]), torch.cat([labels, unread]))
    scores = metrics.compute("val")
    assert not recwarn.list  # a class without an image is nothing to warn of
    truth, probabilities = targets.numpy(), logits.sigmoid().numpy()
    hits = probabilities > 0.5
    precision = average_precision_score(truth[:, :5], probabilities[:, :5])
    assert scores["val/mAP"] == pytest.approx(precision, abs=1e-6)
    f1 = f1_score(truth, hits, average="macro", zero_division=0)
    assert scores["val/f1"] == pytest.approx(f1, abs=1e-6)
    loss = F.binary_cross_entropy_with_logits(logits, targets)
    assert scores["val/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert 0 < scores["val/lrap"] < 1  # a metric of the user's own
    by_class = metrics.by_class("abcdef")
    assert by_class["images"] == 200
    assert by_class["per_class"]["f"] is None
    hits_of_a = hits[truth[:, 0] == 1, 0]
    assert by_class["per_class"]["a"] == pytest.approx(100 * hits_of_a.mean())


@pytest.mark.parametrize(("top_k", "names"), [(None, [["b", "a"], []]), (1, [["b"], []])])
def test_predictions_are_the_classes_above_a_half(top_k, names):
    probabilities = torch.tensor([[0.6, 0.7, 0.4], [0.1, 0.5, 0.1]])
    best = MultiLabel(3).best(probabilities, ["a", "b", "c"], top_k)
    assert [[one["class"] for one in image] for image in best] == names


# The loss


def test_the_loss_is_torchs_with_smoothing():
    logits, targets = answers()
    smoothed = 0.9 * targets + 0.05
    expected = F.binary_cross_entropy(logits.double().sigmoid(), smoothed.double())
    loss = MultiLabelLoss(0.1)(logits, targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


class Counted:
    """What a data module says of the classes of its images."""

    def __init__(self, counts: list[int], images: int):
        self.counts = counts
        self.source = type("Source", (), {"train": range(images)})

    def class_counts(self) -> list[int]:
        return self.counts


def test_classes_of_few_images_weigh_more_in_the_loss():
    settings = LossSettings(class_weights="balanced")
    loss = MultiLabel(3).loss(settings, Counted([200, 50, 0], 200))
    assert loss.weights.tolist() == [
        1,
        3,
        1,
    ]  # of a class on every image, or on none, nothing is known
    logits, targets = answers()
    logits, targets = logits[:, :3], targets[:, :3]
    smoothed = 0.9 * targets + 0.05
    positive = loss.weights * smoothed * F.logsigmoid(logits)
    negative = (1 - smoothed) * F.logsigmoid(-logits)
    assert torch.isclose(loss(logits, targets), -(positive + negative).mean(), atol=1e-5)


def test_distillation_is_for_one_label_per_image():
    with pytest.raises(UserError, match="distillation"):
        trainer().fit(module(task="multi_label", distillation="hard"), loader())


# Mixup and CutMix


@pytest.mark.parametrize(
    ("mode", "switch"), [("batch", 0.0), ("pair", 1.0), ("elem", 0.0), ("elem", 1.0)]
)
def test_labels_are_mixed_in_the_shares_of_one_label_per_image(mode, switch):
    """Which are timm's."""
    images = torch.rand(8, 3, 16, 16)
    classes = torch.tensor([0, 1, 2, 3, 3, 1, 0, 2])
    labels = F.one_hot(classes, 4).float()
    mixing = Mixing(mix_mode=mode, mix_switch_prob=switch)
    of_classes, shares = mixing.mix(images.clone(), classes, 4, seed=3)
    of_labels, shares_of_labels = mixing.mix(images.clone(), labels, 4, seed=3)
    assert torch.equal(of_labels, of_classes)
    assert torch.allclose(shares_of_labels, shares, atol=1e-6)
    two_labels = labels + labels.roll(1, dims=1)  # whose shares add up
    _, sums = mixing.mix(images.clone(), two_labels, 4, seed=3)
    assert torch.allclose(sums, shares + shares.roll(1, dims=1), atol=1e-6)

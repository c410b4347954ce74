"""The losses of labels against timm's and torch's."""

from __future__ import annotations

import pytest
import torch
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy

from cait.errors import UserError
from cait.train.losses import LossSettings

B, C = 8, 7


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(B, C, requires_grad=True)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor) -> None:
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*gradients)


def test_bce_of_mixed_images_counts_both_classes_in_full(logits: torch.Tensor) -> None:
    mixing = Mixup(mixup_alpha=0.8, label_smoothing=0.0, num_classes=C)
    _, targets = mixing(torch.zeros(B, 3, 8, 8), torch.arange(B) % C)
    assert ((targets > 0) & (targets < 1)).any()
    theirs = TimmBinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
    assert_same(LossSettings("bce", label_smoothing=0.0).build()(logits, targets), theirs(logits, targets), logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_of_labels_is_timms(smoothing: float, logits: torch.Tensor) -> None:
    labels = torch.arange(B) % C
    ours = LossSettings("bce", smoothing).build()(logits, labels)
    assert_same(ours, TimmBinaryCrossEntropy(smoothing=smoothing)(logits, labels), logits)


def test_one_of_your_own(logits: torch.Tensor) -> None:
    labels = torch.arange(B) % C
    ours = LossSettings("torch.nn:MultiMarginLoss").build()(logits, labels)
    assert_same(ours, torch.nn.functional.multi_margin_loss(logits, labels), logits)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("focal", "unknown loss 'focal'; choose cross_entropy, bce or package.module:factory"),
        ("torch.nn:FocalLoss", "cannot import torch.nn:FocalLoss: torch.nn has no 'FocalLoss'"),
        ("builtins:dict", "must return a function"),
    ],
)
def test_what_is_no_loss_is_told_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LossSettings(name).build()

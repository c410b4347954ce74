"""The regression beside scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from cait.extras.features import USUAL, Head, held_out, solve

CLASSES = 4


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [240, 12] of uneven scale, and classes [240] that depend on them."""
    torch.manual_seed(0)
    rows = torch.randn(240, 12)
    labels = (rows @ torch.randn(12, CLASSES) + 2 * torch.randn(240, CLASSES)).argmax(1)
    return rows * torch.logspace(-2, 2, 12) + 3, labels


def logits(found: Head, features: torch.Tensor) -> np.ndarray:
    return (features.double() @ found.weight.double().T + found.bias).numpy()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_head_is_scikit_learns(
    drawn: tuple[torch.Tensor, torch.Tensor], weighted: bool
) -> None:
    features, labels = drawn
    weights = torch.tensor([1.0, 2.0, 5.0, 1.0])[labels] if weighted else None
    found = solve(features, labels, CLASSES, weights)
    rows = StandardScaler().fit_transform(features.double())
    given = None if weights is None else (weights / weights.mean()).numpy()
    oracle = LogisticRegression(C=found.strength, tol=1e-8, max_iter=2000).fit(rows, labels, given)
    ours = torch.from_numpy(logits(found, features)).softmax(1).numpy()
    assert np.abs(ours - oracle.predict_proba(rows)).max() < 0.01


def test_several_labels_are_solved_one_against_the_rest(
    drawn: tuple[torch.Tensor, torch.Tensor],
) -> None:
    features, labels = drawn
    several = torch.stack([labels < 2, labels % 2 == 0], dim=1)
    found = solve(features, several.float(), 2)
    rows = StandardScaler().fit_transform(features.double())
    oracle = OneVsRestClassifier(LogisticRegression(C=found.strength, tol=1e-8, max_iter=2000)).fit(
        rows, several
    )
    assert (
        np.abs(
            torch.from_numpy(logits(found, features)).sigmoid().numpy() - oracle.predict_proba(rows)
        ).max()
        < 0.01
    )


def test_the_strength_suits_rows_that_were_held_out(
    drawn: tuple[torch.Tensor, torch.Tensor],
) -> None:
    features, labels = drawn
    noise = torch.randint(CLASSES, labels.shape, generator=torch.Generator().manual_seed(1))
    assert solve(features, noise, CLASSES).strength < solve(features, labels, CLASSES).strength


def test_of_each_class_one_of_five_is_held_out_and_never_the_last() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 4 + [3])
    held = held_out(labels)
    assert torch.bincount(labels[held], minlength=4).tolist() == [2, 1, 0, 0]


def test_classes_of_one_image_and_of_none_are_solved() -> None:
    # the second value tells nothing
    features = torch.tensor([[0.0, 1.0], [0.1, 1.0], [0.0, 1.0], [9.0, 1.0]])
    found = solve(features, torch.tensor([0, 0, 0, 1]), 3)
    assert found.strength == USUAL
    assert torch.isfinite(found.weight).all()
    assert logits(found, features)[:, 2].max() < logits(found, features)[:, :2].min()


def test_the_number_of_threads_changes_no_bit(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(solve(*drawn, CLASSES))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert torch.equal(found[0].weight, found[1].weight)

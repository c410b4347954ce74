"""The regression beside scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from cait.extras.features import USUAL, solve

CLASSES = 4


@pytest.fixture(scope="module")
def features():
    """[240, 12], of uneven scale."""
    torch.manual_seed(0)
    return torch.randn(240, 12) * torch.logspace(-2, 2, 12) + 3


@pytest.fixture(scope="module")
def labels(features):
    """[240], which depend on the features."""
    scores = StandardScaler().fit_transform(features) @ torch.randn(12, CLASSES).numpy()
    noise = 2 * torch.randn(240, CLASSES)
    return (torch.from_numpy(scores) + noise).argmax(1)


@pytest.fixture(scope="module")
def rows(features):
    """The same on one scale, as scikit-learn needs them."""
    return StandardScaler().fit_transform(features.double())


def logits(head, features):
    return features.double() @ head.weight.double().T + head.bias


def scikit_learn(strength):
    return LogisticRegression(C=strength, tol=1e-8, max_iter=2000)


@pytest.mark.parametrize("of_class", [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 5.0, 1.0]])
def test_the_head_is_scikit_learns(of_class, features, labels, rows):
    weights = torch.tensor(of_class)[labels]
    head = solve(features, labels, CLASSES, weights if max(of_class) > 1 else None)
    oracle = scikit_learn(head.strength).fit(rows, labels, weights / weights.mean())
    ours = logits(head, features).softmax(1).numpy()
    assert np.abs(ours - oracle.predict_proba(rows)).max() < 0.01


def test_several_labels_are_solved_one_against_the_rest(features, labels, rows):
    several = torch.stack([labels < 2, labels % 2 == 0], dim=1)
    head = solve(features, several.float(), 2)
    oracle = OneVsRestClassifier(scikit_learn(head.strength)).fit(rows, several)
    ours = logits(head, features).sigmoid().numpy()
    assert np.abs(ours - oracle.predict_proba(rows)).max() < 0.01


def test_the_strength_suits_rows_that_were_held_out(features, labels):
    noise = torch.randint(CLASSES, labels.shape, generator=torch.Generator().manual_seed(1))
    of_noise = solve(features, noise, CLASSES)
    assert of_noise.strength < solve(features, labels, CLASSES).strength


def test_classes_of_one_image_and_of_none_are_solved():
    # the second value tells nothing
    features = torch.tensor([[0.0, 1.0], [0.1, 1.0], [0.0, 1.0], [9.0, 1.0]])
    head = solve(features, torch.tensor([0, 0, 0, 1]), 3)
    assert head.strength == USUAL
    assert torch.isfinite(head.weight).all()
    scores = logits(head, features)
    assert scores[:, 2].max() < scores[:, :2].min()


def test_the_number_of_threads_changes_no_bit(features, labels):
    before = torch.get_num_threads()
    weights = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        weights.append(solve(features, labels, CLASSES).weight)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert torch.equal(*weights)

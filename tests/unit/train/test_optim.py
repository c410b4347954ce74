"""The optimizer of the settings. What is refused is in tests/cli/golden/train.yaml."""

import pytest
from torch import nn

from cait.train.optim import OptimizerSettings, param_groups


def test_a_decay_of_0_keeps_the_groups():
    """A resumed run may change its decay; its optimizer's state is by group."""
    assert [group["weight_decay"] for group in param_groups(nn.Linear(2, 2), 0.0)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "weight_decay", "expected"),
    [("AdamW", None, 0.05), ("sgd", None, 0.0), ("adamw", 0.02, 0.02), ("lion", 0.02, 0.02)],
)
def test_the_default_decay_is_the_papers_with_adamw_alone(name, weight_decay, expected):
    settings = OptimizerSettings(name, weight_decay=weight_decay)
    groups = settings.build_optimizer(nn.Linear(2, 2), lr=1e-3).param_groups
    assert max(group["weight_decay"] for group in groups) == expected

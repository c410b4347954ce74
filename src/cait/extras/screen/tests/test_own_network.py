"""What a network of one's own would do otherwise than meant is told before it trains."""

import pytest
import torch
import torch.nn.functional as F
from modules import loader, module, trainer
from torch import Tensor, nn

from cait.extras.screen import step_callbacks


class Well(nn.Module):
    def __init__(self, img_size: int, num_classes: int):
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean(dim=(2, 3)))


class Softmax(Well):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).softmax(dim=1)


class Dropout(Well):
    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(super().forward(images))


class Hidden(Well):
    """No optimizer and no checkpoint sees what is in a list."""

    def __init__(self, img_size: int, num_classes: int):
        super().__init__(img_size, num_classes)
        self.hidden = [nn.Linear(num_classes, num_classes)]

    def forward(self, images: Tensor) -> Tensor:
        return self.hidden[0](super().forward(images))


def printed_of(name, capsys):
    own = module(name=f"{__name__}:{name}", fields=None)
    trainer(max_steps=1).fit(own, loader())
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Softmax", "ends in a softmax: leave that out"),
        ("Dropout", "gives other logits when it sees the same images again"),
        ("Hidden", "computes with weights [7"),
    ],
)
def test_what_a_network_would_do_otherwise_than_meant_is_told(name, words, capsys):
    assert f":{name} {words}" in printed_of(name, capsys)


def test_of_a_network_that_is_well_nothing_is_told(capsys):
    assert "Well" not in printed_of("Well", capsys)


def test_it_leaves_the_numbers_of_the_run_alone():
    own = module(name=f"{__name__}:Dropout", fields=None)
    [callback] = step_callbacks(own, None)
    before = torch.get_rng_state()
    callback.setup(trainer(), own, "fit")
    assert torch.equal(before, torch.get_rng_state())
    assert own.model.training
    assert all(parameter.grad is None for parameter in own.parameters())


def test_other_networks_are_left_alone():
    assert step_callbacks(module(), None) == []

"""What a network of one's own would do otherwise than meant is told before it trains."""

import torch
import torch.nn.functional as F
from harness import over_table
from modules import module, train, trainer
from torch import nn

from cait.extras.screen import step_callbacks


class Well(nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images):
        return self.head(images.mean(dim=(2, 3)))


class Softmax(Well):
    def forward(self, images):
        return super().forward(images).softmax(dim=1)


class Dropout(Well):
    def forward(self, images):
        return F.dropout(super().forward(images))


class Hidden(Well):
    """No optimizer and no checkpoint sees what is in a list."""

    def __init__(self, img_size, num_classes):
        super().__init__(img_size, num_classes)
        self.hidden = [nn.Linear(num_classes, num_classes)]

    def forward(self, images):
        return self.hidden[0](super().forward(images))


@over_table(__file__, "told")
def test_what_a_network_would_do_otherwise_than_meant_is_told(case, words, capsys):
    train(module(name=f"{__name__}:{case}", fields=None), max_steps=1)
    printed = capsys.readouterr().err
    assert f":{case} {words}" in printed if words else case not in printed


def test_it_leaves_the_numbers_of_the_run_alone():
    own = module(name=f"{__name__}:Dropout", fields=None)
    [callback] = step_callbacks(own, None)
    before = torch.get_rng_state()
    callback.setup(trainer(), own, "fit")
    assert torch.equal(before, torch.get_rng_state())
    assert own.model.training
    assert own.model.head.weight.grad is None


def test_other_networks_are_left_alone():
    assert step_callbacks(module(), None) == []

"""What a network of one's own would do otherwise than meant is told before it trains."""

import pytest
import torch
import torch.nn.functional as F
from modules import loader, module, trainer
from torch import Tensor, nn

from cait.extras.screen import step_callbacks


class Odd(nn.Module):
    """A network with the mistake that `kind` names."""

    def __init__(self, img_size: int, num_classes: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = nn.Linear(3, num_classes)
        self.hidden = [nn.Linear(num_classes, num_classes)]

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(images.mean(dim=(2, 3)))
        match self.kind:
            case "hidden":
                return self.hidden[0](logits)
            case "softmax":
                return logits.softmax(dim=1)
            case "dropout":
                return F.dropout(logits)
        return logits


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("softmax", "ends in a softmax: leave that out"),
        ("dropout", "gives other logits when it sees the same images again"),
        ("hidden", "computes with weights [7"),
        ("well", ""),
    ],
)
def test_what_a_network_would_do_otherwise_than_meant_is_told(
    kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = module(name=f"{__name__}:Odd", fields=dict(kind=kind))
    trainer(max_steps=1).fit(own, loader())
    told = capsys.readouterr().err
    assert f"{own.name} {words}" in told or not words
    assert bool(words) == (own.name in told)


def test_it_leaves_the_numbers_of_the_run_alone() -> None:
    own = module(name=f"{__name__}:Odd", fields=dict(kind="dropout"))
    [callback] = step_callbacks(own, None)
    before = torch.get_rng_state()
    callback.setup(trainer(), own, "fit")
    assert torch.equal(before, torch.get_rng_state())
    assert own.model.training
    assert all(parameter.grad is None for parameter in own.parameters())


def test_other_networks_are_left_alone() -> None:
    assert step_callbacks(module(), None) == []

"""Parts of the user's own are whole parts of a run: what a loss learns, and how a subclass answers.

That what they learn is resumed to the bit is a row of tests/law/test_exact.yaml.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from harness import over_table
from modules import loader, module, train, trainer
from torch import nn
from torch.nn.functional import cross_entropy

from cait import ckpt
from cait.cli.loading import Loaded
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.references import name_of
from cait.train.callbacks import EMA
from cait.train.module import CaiTModule


class Scaled(nn.Module):
    """A loss that learns a temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits, targets):
        return cross_entropy(logits * self.scale, targets)


def frozen():
    return Scaled().requires_grad_(False)


class Learns(CaiTModule):
    """Learns a temperature in its loss and a layer in its forward pass."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(7, 7)
        self.fixed = nn.Linear(7, 7).requires_grad_(False)

    def forward(self, images):
        return self.fixed(self.last(super().forward(images)))

    def loss_of(self, logits, targets):
        return super().loss_of(logits * self.scale, targets)


class OnlyTheNetwork(CaiTModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def named(loss):
    return f"{__name__}:{loss.__name__}"


@over_table(__file__, "optimizers")
def test_what_a_loss_or_a_module_learns_is_a_group_without_weight_decay(settings):
    rates = dict(lr=1e-2, warmup_epochs=0, weight_decay=0.1)
    net = module(Learns, loss=named(Scaled), **rates, **settings)
    learned = [net.scale, *net.last.parameters(), net.loss.scale]
    before = [parameter.clone() for parameter in learned]
    *_, group = train(net).optimizers[0].param_groups
    assert {*group["params"]} == {*learned}
    assert group["weight_decay"] == 0
    assert not any(map(torch.equal, learned, before))


def test_a_loss_that_learns_nothing_needs_no_optimizer():
    assert train(module(OnlyTheNetwork, loss=named(frozen))).global_step == 6


class Cold(CaiTModule):
    def forward(self, images):
        return super().forward(images.flip(3)) - 2 * self.model(images)


class Sharp(CaiTModule):
    def predict_step(self, batch, batch_idx):
        return super().predict_step(batch, batch_idx).square()


class SameName(CaiTModule):
    pass


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_a_forward_of_ones_own_is_what_validates(precision):
    """In every precision, as the moving average, which keeps its own."""
    net = module(Cold, lr=0.1, warmup_epochs=0, schedule="constant")
    average = EMA(0.5)
    images, labels = next(iter(loader(8, 8)))
    fit = train(net, images=loader(8, 8), callbacks=[average], precision=precision)
    kept = torch.float64 if precision == "64-true" else torch.float32
    assert {parameter.dtype for parameter in average.average.parameters()} == {kept}
    assert fit.callback_metrics["lr"].item() == pytest.approx(0.1, rel=1e-6)
    for prefix, network in (("val", net.model), ("val_ema", average.average)):
        network.float().eval()
        expected = cross_entropy(network(images.flip(3)) - 2 * network(images), labels)
        loss = fit.callback_metrics[f"{prefix}/loss"].float()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)  # bf16-true rounds the images


@pytest.mark.parametrize("kind", [Cold, Sharp])
def test_what_answers_is_the_module(kind):
    net = module(kind).eval()
    batch = next(iter(loader(8, 8)))
    data = SimpleNamespace(predict_dataloader=lambda: [batch])
    loaded = Loaded(net.model, net.name, "", ["a"] * 7, data, module=net)
    ((probabilities, _),) = loaded.judge([])
    assert torch.equal(probabilities, net.predict_step(batch, 0))
    assert not torch.equal(probabilities, net.model(batch[0]).softmax(dim=1))


def saved(kind, folder):
    path = folder / "x.ckpt"
    train(module(kind), path, loader(4))
    return path


@pytest.mark.parametrize("now", [Cold, SameName, CaiTModule])
@pytest.mark.parametrize("before", [Cold, Sharp, SameName, CaiTModule])
def test_a_run_remembers_the_class_of_its_module(before, now, tmp_path):
    """To go on, and to answer if the class answers in its own way."""
    path = saved(before, tmp_path)
    goes_on = before is now
    answers = goes_on or before in (SameName, CaiTModule)
    for verb, is_taken in ((trainer().fit, goes_on), (trainer().validate, answers)):
        net = module(now)
        if is_taken:
            verb(net, loader(4), ckpt_path=path)
        else:
            with pytest.raises(UserError, match=name_of(before)):
                verb(net, loader(4), ckpt_path=path)


@pytest.mark.parametrize("value", [None, []])
def test_a_run_of_before_has_no_class(value, tmp_path):
    path = saved(Cold, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | {ckpt.MODULE: value}, path)
    trainer().fit(module(), loader(), ckpt_path=path)


class ByHand(CaiTModule):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * (math.nan if batch_idx == 1 else 1))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_by_hand_without_a_finite_gradient_is_skipped(tmp_path):
    net = module(ByHand)
    train(net, callbacks=[NonFiniteGuard(tmp_path, 2)])
    assert all(parameter.isfinite().all() for parameter in net.parameters())

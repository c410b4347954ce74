"""Parts of the user's own are whole parts of a run: what a loss learns, and how a subclass answers."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import FIELDS, loader, module, trainer
from torch import Tensor, nn

from cait import ckpt
from cait.cli.loading import Loaded
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.references import name_of
from cait.train.callbacks import EMA
from cait.train.module import CaiTModule


class Scaled(nn.Module):
    """A loss that learns a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.scale, targets)


class Frozen(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


class Plain:
    """No module, so nobody knows of its parameter."""

    def __init__(self) -> None:
        self.loss = Scaled()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets)


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses = [Scaled()]

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.losses[0](logits, targets)


def bound() -> Any:
    return Scaled().forward


def closed_over() -> Any:
    loss = Scaled()
    return lambda logits, targets: loss(logits, targets)


def bound_to_an_argument() -> Any:
    def compute(weight: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits * weight, targets)

    return partial(compute, nn.Parameter(torch.ones(())))


def named(part: Any) -> str:
    return f"{__name__}:{part.__name__}"


OPTIMIZERS: list[dict[str, Any]] = [
    dict(optimizer="adamw"),
    dict(optimizer="adamw", layer_decay=0.75),
    *(
        dict(optimizer=name, weight_decay=0.1)
        for name in ("sgd", "lamb", "lion", "muon", "lookahead_adamw", "torch.optim:RAdam")
    ),
]


@pytest.mark.parametrize(
    "settings", OPTIMIZERS, ids=lambda settings: "-".join(map(str, settings.values()))
)
def test_what_a_loss_learns_is_a_group_without_weight_decay(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def run(epochs: int, start: Path | None = None) -> CaiTModule:
        torch.manual_seed(0)
        rates = dict(warmup_epochs=0, schedule="constant", lr=1e-2, drop_path_rate=0.0)
        net = module(loss=named(Scaled), **rates, **settings)
        fit = trainer(max_epochs=epochs, limit_train_batches=1)
        fit.fit(net, loader(), ckpt_path=start)
        *_, group = fit.optimizers[0].param_groups
        assert [*group["params"]] == [net.loss.scale]
        assert group["weight_decay"] == 0
        assert group["lr"] == 1e-2
        fit.save_checkpoint(tmp_path / "x.ckpt")
        return net

    expected = run(2).loss.scale.item()
    assert run(1).loss.scale.item() not in (1, expected)
    assert run(2, tmp_path / "x.ckpt").loss.scale.item() == expected


@pytest.mark.parametrize("part", [Plain, InAList, bound, closed_over, bound_to_an_argument])
def test_a_parameter_that_a_loss_hides_is_refused(part: Any) -> None:
    with pytest.raises(UserError, match="has a parameter that no optimizer trains"):
        trainer(max_epochs=1).fit(module(loss=named(part)), loader())


class OnlyTheNetwork(CaiTModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_optimizers_of_ones_own_have_what_the_loss_learns(tmp_path: Path) -> None:
    settings: dict = dict(img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    with pytest.raises(UserError, match="no optimizer trains"):
        trainer(max_epochs=1).fit(OnlyTheNetwork(loss=named(Scaled), **settings), loader())
    fit = trainer(max_epochs=1, limit_train_batches=1)
    fit.fit(OnlyTheNetwork(loss=named(Frozen), **settings), loader())
    assert fit.global_step == 1


SETTINGS: dict[str, Any] = dict(
    img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None, warmup_epochs=0
)


class Learns(CaiTModule):
    """Learns a temperature in its loss and a layer in its forward pass."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(7, 7)
        self.fixed = nn.Linear(7, 7).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.fixed(self.last(super().forward(images)))

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss_of(logits * self.scale, targets)


class Hides(CaiTModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scales = [nn.Parameter(torch.ones(()))]

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss_of(logits * self.scales[0], targets)


def test_what_a_module_of_ones_own_learns_is_trained_and_resumed(tmp_path: Path) -> None:
    def run(epochs: int, start: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Learns(**SETTINGS, lr=1e-2, schedule="constant", drop_path_rate=0.0)
        fit = trainer(max_epochs=epochs, limit_train_batches=1)
        fit.fit(net, loader(), ckpt_path=start)
        *_, group = fit.optimizers[0].param_groups
        assert {*group["params"]} == {net.scale, *net.last.parameters()}
        assert group["weight_decay"] == 0
        fit.save_checkpoint(tmp_path / "x.ckpt")
        return {name: value.clone() for name, value in net.state_dict().items()}

    expected, early = run(2), run(1)
    for name in ("scale", "last.weight", "last.bias"):
        assert not torch.equal(early[name], expected[name])
    torch.testing.assert_close(run(2, tmp_path / "x.ckpt"), expected, rtol=0, atol=0)


def test_a_parameter_that_ones_own_loss_hides_is_refused() -> None:
    net = Hides(**SETTINGS)
    with pytest.raises(
        UserError, match=r"the loss Hides\.loss_of has a parameter that no optimizer"
    ):
        trainer(max_epochs=1).fit(net, loader())


class Cold(CaiTModule):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flip(3)) - 2 * self.model(images)


class Sharp(CaiTModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().predict_step(batch, batch_idx).square()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_a_forward_of_ones_own_is_what_validates(precision: Any) -> None:
    net = Cold(**SETTINGS, lr=0.1)
    images = loader(8, 8)
    fit = trainer(max_epochs=1, callbacks=[average := EMA(0.5)], precision=precision)
    fit.fit(net, images, images)
    batch, labels = next(iter(images))
    for prefix, network in (("val", net.model), ("val_ema", average.average)):
        network = network.float().eval()
        expected = network(batch.flip(3)) - 2 * network(batch)
        loss = F.cross_entropy(expected, labels)
        got = fit.callback_metrics[f"{prefix}/loss"].float()
        torch.testing.assert_close(got, loss, rtol=1e-3, atol=0)  # bf16-true rounds the images
    probabilities = net.float().predict_step((batch,), 0)
    expected = net.model(batch.flip(3)) - 2 * net.model(batch)
    torch.testing.assert_close(probabilities, expected.softmax(dim=1))


@pytest.mark.parametrize("kind", [Cold, Sharp])
def test_what_answers_is_the_module(kind: type[CaiTModule]) -> None:
    net = kind(**SETTINGS).eval()
    batch, labels = next(iter(loader(8, 8)))
    data: Any = SimpleNamespace(predict_dataloader=lambda: [(batch, labels)])
    loaded = Loaded(net.model, net.name, "", ["a"] * 7, data, module=net)
    ((probabilities, _),) = loaded.judge([])
    assert torch.equal(probabilities, net.predict_step((batch,), 0).cpu())
    assert not torch.equal(probabilities, net.model(batch).softmax(dim=1).cpu())


class SameName(CaiTModule):
    pass


def saved(kind: type[CaiTModule], path: Path) -> Path:
    fit = trainer(max_epochs=1, limit_train_batches=1)
    fit.fit(kind(**SETTINGS), loader())
    fit.save_checkpoint(path / "x.ckpt")
    return path / "x.ckpt"


@pytest.mark.parametrize("before", [Cold, Sharp, SameName, CaiTModule])
@pytest.mark.parametrize("now", [Cold, SameName, CaiTModule])
def test_a_run_remembers_the_class_of_its_module(
    before: type[CaiTModule], now: type[CaiTModule], tmp_path: Path
) -> None:
    path = saved(before, tmp_path)
    if before is not now:
        with pytest.raises(UserError, match=f"the run's module is {name_of(before)}, this one"):
            trainer().fit(now(**SETTINGS), loader(), ckpt_path=path)
    else:
        trainer().fit(now(**SETTINGS), loader(), ckpt_path=path)
    answers_alike = before in (now, SameName, CaiTModule)
    if answers_alike:
        trainer().validate(now(**SETTINGS), loader(4), path, verbose=False)
        return
    with pytest.raises(UserError, match=f"by --module {name_of(before)}$"):
        trainer().validate(now(**SETTINGS), loader(4), path, verbose=False)


def test_a_run_of_before_has_no_class(tmp_path: Path) -> None:
    path = saved(Cold, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    for value in (None, []):
        checkpoint[ckpt.MODULE] = value
        torch.save(checkpoint, path)
        trainer().fit(CaiTModule(**SETTINGS), loader(), ckpt_path=path)


class ByHand(CaiTModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * (math.nan if batch_idx == 1 else 1))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_by_hand_without_a_finite_gradient_is_skipped(tmp_path: Path) -> None:
    net = ByHand(**SETTINGS)
    guard = NonFiniteGuard(tmp_path, 2)
    trainer(max_epochs=1, callbacks=[guard]).fit(net, loader())
    assert all(parameter.isfinite().all() for parameter in net.parameters())

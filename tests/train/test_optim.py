"""Optimizers and parameter groups against timm's; the rate of every step against its closed form and torch's cosine."""

import math
import runpy
import sys
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from modules import loader, module, trainer
from timm.optim import create_optimizer_v2
from torch import nn

import cait
from cait.errors import UserError
from cait.train.optim import (
    Length,
    OptimizerSettings,
    ScheduleSettings,
    WarmupSchedule,
    param_groups,
)


def test_a_decay_of_0_keeps_the_groups() -> None:
    """A resumed run may change its decay; its optimizer's state is by group."""
    assert [group["weight_decay"] for group in param_groups(cait.create_model("xxs24"), 0.0)] == [
        0.0,
        0.0,
    ]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return cait.create_model(
        "xxs24", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=5
    ).double()


@pytest.mark.parametrize("layer_decay", [None, 0.8])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sgd", dict(momentum=0.8, nesterov=True)),
        ("muon", {}),
        ("lookahead_lion", {}),
        ("adamw", {}),
    ],
)
def test_a_step_is_that_of_timms_optimizer(
    name: str, arguments: dict, layer_decay: float | None
) -> None:
    weights = []
    for kind in ("ours", "timms"):
        net = small_net()
        decay: dict = dict(weight_decay=0.1, layer_decay=layer_decay)
        if kind == "ours":
            optimizer = OptimizerSettings(name, arguments, **decay).build_optimizer(net, lr=1e-3)
        else:
            optimizer = create_optimizer_v2(net, name, lr=1e-3, **decay, **arguments)
        for _ in range(8):  # lookahead synchronizes at the sixth
            optimizer.zero_grad()
            net(torch.randn(4, 3, 32, 32).double()).square().mean().backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(
        weights[0], torch.cat([p.flatten() for p in small_net().parameters()]), atol=1e-5
    )


class TakesNoClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamm", {}, "optimizer adamm: .*Optimizer adamm not found in registry"),
        ("sgd", dict(momentun=0.9), "optimizer sgd: .*momentun"),
        ("torch.optim:Rprob", {}, "has no 'Rprob'; did you mean Rprop"),
        ("builtins:dict", {}, "must return a torch.optim.Optimizer"),
        ("adahessian", {}, "needs second derivatives"),
        (
            f"{__name__}:TakesNoClosure",
            {},
            "TakesNoClosure: TypeError: got an unexpected keyword argument 'closure'",
        ),
    ],
)
def test_an_optimizer_that_is_none_is_refused_in_one_line(
    name: str, arguments: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        OptimizerSettings(name, arguments, weight_decay=0.0).build_optimizer(
            nn.Linear(2, 2), lr=1e-3
        )
    assert "\n" not in str(error.value)


def test_the_default_decay_is_the_papers_with_adamw_alone() -> None:
    for name, given, taken in (
        ("AdamW", None, 0.05),
        ("sgd", None, 0.0),
        ("adamw", 0.02, 0.02),
        ("lion", 0.02, 0.02),
    ):
        groups = (
            OptimizerSettings(name, weight_decay=given)
            .build_optimizer(small_net(), lr=1e-3)
            .param_groups
        )
        assert max(group["weight_decay"] for group in groups) == taken


def closed_form(step: int, warmup: int, total: int) -> float:
    peak, start, end = 1e-3, 1e-6, 1e-5
    if step < warmup:
        return start + (peak - start) * step / max(warmup - 1, 1)
    return (
        end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1))) / 2
    )


def scheduled(warmup: int, total: int, **settings: object) -> tuple[torch.optim.Optimizer, object]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return optimizer, WarmupSchedule(
        optimizer, ScheduleSettings(**settings), lambda: Length(warmup, total)
    )


def rates(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int
) -> list[float]:
    """The rate of each step, and the one after them."""
    taken = [optimizer.param_groups[-1]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        taken.append(optimizer.param_groups[-1]["lr"])
    return taken


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(
    ("warmup", "total"),
    [(0, 40), (1, 40), (2, 40), (5, 40), (39, 40), (40, 40), (200, 40), (0, 1), (1, 1), (5, 1)],
)
def test_every_step_has_the_rate_of_the_closed_form(warmup: int, total: int, schedule: str) -> None:
    taken = rates(*scheduled(warmup, total, schedule=schedule), total)
    warmup = min(warmup, total)
    expected = [closed_form(step, warmup, total) for step in range(total + 1)]
    if schedule == "constant":
        assert {*taken[warmup:]} == {1e-3}  # to the bit
        expected[warmup:] = taken[warmup:]
    assert taken == pytest.approx(expected, rel=1e-12)


def test_a_second_fit_goes_on_at_the_step_where_the_trainer_stands() -> None:
    taken = []
    note = LambdaCallback(
        on_train_batch_start=lambda fit, *_: taken.append(fit.optimizers[0].param_groups[0]["lr"])
    )
    fit, net = trainer(max_epochs=1, callbacks=[note]), module(warmup_epochs=0, lr=1e-3)
    fit.fit(net, loader())
    fit.fit_loop.max_epochs = 3
    fit.fit(net, loader())
    expected = [closed_form(step, 0, 6 if step < 6 else 18) for step in range(18)]
    assert taken == pytest.approx(expected, rel=1e-12)


def test_the_rate_of_a_group_is_scaled_in_every_step() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": scale} for scale in (1.0, 0.3)]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    schedule = WarmupSchedule(optimizer, ScheduleSettings(), lambda: Length(3, 12))
    expected = [0.3 * closed_form(step, 3, 12) for step in range(13)]
    assert rates(optimizer, schedule, 12) == pytest.approx(expected, rel=1e-12)


def test_a_run_that_kept_the_peak_falls_from_the_step_that_it_has_reached() -> None:
    optimizer, first = scheduled(5, 100, schedule="constant")
    rates(optimizer, first, 30)
    state, taken = first.state_dict(), []
    for _ in range(30, 40):  # stopped and resumed before every step
        optimizer, rest = scheduled(5, 40, schedule="cosine")
        rest.load_state_dict(state)
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rest.step()
        state = rest.state_dict()
    assert taken == pytest.approx([closed_form(step, 0, 10) for step in range(10)], rel=1e-12)


@pytest.mark.parametrize(("step", "total"), [(7, 80), (20, 40), (39, 41), (6, 9), (30, 31)])
def test_a_bent_cosine_goes_on_at_the_rate_where_it_stands(step: int, total: int) -> None:
    before = Length(5, 40, limits=(4, -1))
    bent = Length(3, total, limits=(4, -1)).bent_through(step, before)
    assert (bent.total, bent.limits) == (total, (4, -1))
    at_step = [closed_form(step, length.warmup, length.total) for length in (before, bent)]
    assert at_step[1] == pytest.approx(at_step[0], rel=1e-12)
    optimizer, schedule = scheduled(5, 40)
    schedule.measure = lambda: Length(3, total, limits=(4, -1))
    state = schedule.state_dict() | {"last_epoch": step, "length": (5, 40, (4, -1))}
    schedule.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(at_step[0], rel=1e-12)
    assert rates(optimizer, schedule, total - step)[-1] == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize("warmup", [2, 5, 39])
def test_it_is_lightning_bolts_schedule(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their package cannot be imported beside this Lightning: run the one file, without its decorator that warns.
    file = distribution("lightning-bolts").locate_file("pl_bolts/optimizers/lr_scheduler.py")
    stability = SimpleNamespace(under_review=lambda: lambda kind: kind)
    monkeypatch.setitem(sys.modules, "pl_bolts.utils.stability", stability)
    theirs = runpy.run_path(str(file))["LinearWarmupCosineAnnealingLR"]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    expected = rates(
        optimizer, theirs(optimizer, warmup, 40, warmup_start_lr=1e-6, eta_min=1e-5), 40
    )
    assert rates(*scheduled(warmup, 40), 40) == pytest.approx(expected, rel=1e-9)


REFUSED_AT_A_STEP = {
    "capturable": dict(optimizer_args={"fused": False, "capturable": True}),
    "differentiable": dict(optimizer_args={"fused": False, "differentiable": True}),
    "sparse": dict(optimizer="torch.optim:SparseAdam", weight_decay=0.0),
}


@pytest.mark.parametrize("settings", REFUSED_AT_A_STEP.values(), ids=REFUSED_AT_A_STEP)
def test_what_the_first_step_would_refuse_is_refused_before(settings: dict[str, Any]) -> None:
    net = module(**settings)  # it can be built
    batches: list[int] = []
    count = LambdaCallback(on_train_batch_start=lambda *_: batches.append(1))
    with pytest.raises(UserError, match="cannot step on cpu"):
        trainer(callbacks=[count]).fit(net, loader())
    assert not batches

"""Parameter groups against timm's; the learning rate of every step against its closed form and torch's cosine."""

import math

import pytest
import timm
import torch
from conftest import python
from timm.optim import param_groups_weight_decay

import cait
from cait.optim import param_groups, warmup_cosine

DISTILLED_DEIT: dict = dict(depth=12, num_heads=3, talking_heads=False, residual="plain", depth_token_only=0)
DISTILLED_DEIT |= dict(class_token_at=0, distillation_token=True)


@pytest.mark.parametrize(
    ("model", "fields"), [("cait_xxs24_224", {}), ("deit_tiny_distilled_patch16_224", DISTILLED_DEIT)]
)
def test_groups_are_timms(model: str, fields: dict) -> None:
    theirs = timm.create_model(model)
    expected = param_groups_weight_decay(theirs, 0.05, no_weight_decay_list=theirs.no_weight_decay())
    names = {id(p): name for name, p in theirs.named_parameters()}
    expected_names = [sorted(names[id(p)] for p in group["params"]) for group in expected]

    ours = cait.create_model("xxs24", **fields)
    groups = param_groups(ours, 0.05)
    names = {id(p): name for name, p in ours.named_parameters()}
    assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in expected]
    assert [sorted(names[id(p)] for p in group["params"]) for group in groups] == expected_names


def test_frozen_parameters_are_left_out() -> None:
    model = cait.create_model("xxs24", img_size=32, depth=1)
    model.patch_embed.requires_grad_(False)
    listed = sum(len(group["params"]) for group in param_groups(model, 0.05))
    assert listed == len(list(model.parameters())) - 2


def closed_form(step: int, warmup: int, total: int, peak: float, start: float, end: float) -> float:
    if step < warmup:
        return start + (peak - start) * step / max(warmup - 1, 1)
    return end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1))) / 2


def rates(warmup: int, total: int, peak: float = 1e-3) -> tuple[list[float], torch.optim.Optimizer, object]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = warmup_cosine(optimizer, warmup_steps=warmup, total_steps=total, warmup_lr=1e-6, min_lr=1e-5)
    taken = []
    for _ in range(total):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return taken, optimizer, schedule


@pytest.mark.parametrize(
    ("warmup", "total"), [(0, 40), (1, 40), (2, 40), (5, 40), (39, 40), (40, 40), (200, 40), (0, 1), (1, 1), (5, 1)]
)
def test_every_step_has_the_rate_of_the_closed_form(warmup: int, total: int) -> None:
    taken, _, _ = rates(warmup, total)
    warmup = min(warmup, total)
    expected = [closed_form(step, warmup, total, 1e-3, 1e-6, 1e-5) for step in range(total)]
    assert taken == pytest.approx(expected, rel=1e-12)


def test_without_warmup_it_is_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60, eta_min=1e-5)
    expected = []
    for _ in range(60):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert rates(0, 60)[0] == pytest.approx(expected, rel=1e-9)


def test_rounding_does_not_build_up_over_a_long_run() -> None:
    taken, _, _ = rates(500, 50_000)
    assert taken[-1] == pytest.approx(closed_form(49_999, 500, 50_000, 1e-3, 1e-6, 1e-5), rel=1e-12)


def test_a_resumed_schedule_follows_the_settings_of_now() -> None:
    _, _, schedule = rates(5, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    longer = warmup_cosine(optimizer, warmup_steps=5, total_steps=80, warmup_lr=1e-6, min_lr=1e-5)
    optimizer.param_groups[0].update(lr=123.0, initial_lr=456.0)  # as a checkpoint's state would
    longer.load_state_dict(schedule.state_dict())
    for step in range(20, 80):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(closed_form(step, 5, 80, 2e-3, 1e-6, 1e-5), rel=1e-12)
        optimizer.step()
        longer.step()


def test_importing_lightning_bolts_says_nothing() -> None:
    # In a process of its own: here it is imported already.
    code = (
        "import torch; from cait.optim import warmup_cosine\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)\n"
        "warmup_cosine(optimizer, warmup_steps=2, total_steps=4, warmup_lr=0, min_lr=0)"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

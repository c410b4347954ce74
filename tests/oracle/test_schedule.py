"""The rate of every step against its closed form, and against lightning-bolts' schedule."""

import math
import runpy
import sys
from importlib.metadata import distribution
from types import SimpleNamespace

import pytest
import torch
from harness import over_table
from torch import nn

from cait.train.optim import Length, ScheduleSettings, WarmupSchedule

PEAK, START, END = 1e-3, 1e-6, 1e-5
LIMITS = (4, -1)


def cosine(share):
    """The rate after this share of the fall."""
    return END + (PEAK - END) * (1 + math.cos(math.pi * share)) / 2


def closed_form(step, warmup, total):
    if step < warmup:
        return START + (PEAK - START) * step / max(warmup - 1, 1)
    return cosine((step - warmup) / max(total - warmup, 1))


def optimizer_of(*scales):
    groups = [dict(params=[nn.Parameter(torch.zeros(1))], lr_scale=scale) for scale in scales]
    return torch.optim.SGD(groups, lr=PEAK)


def scheduled(length, *scales, schedule="cosine"):
    settings = ScheduleSettings(schedule=schedule)
    return WarmupSchedule(optimizer_of(*scales or (1.0,)), settings, lambda: length)


def rates(schedule, steps):
    """The rate of each step, and the one after them."""
    taken = []
    for _ in range(steps + 1):
        taken.append(schedule.optimizer.param_groups[-1]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return taken


@pytest.mark.parametrize("total", [1, 40])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 39, 40, 200])
def test_every_step_has_the_rate_of_the_closed_form(warmup, total):
    length = Length(warmup, total)
    warmup = min(warmup, total)
    expected = [closed_form(step, warmup, total) for step in range(total + 1)]
    assert rates(scheduled(length), total) == pytest.approx(expected, rel=1e-12)
    constant = rates(scheduled(length, schedule="constant"), total)
    assert constant[:warmup] == pytest.approx(expected[:warmup], rel=1e-12)
    assert {*constant[warmup:]} == {PEAK}  # to the bit


@pytest.mark.parametrize("warmup", [2, 5, 39])
def test_it_is_lightning_bolts_schedule(warmup, monkeypatch):
    # Their package cannot be imported beside this Lightning: run the one file, without its decorator that warns.
    file = distribution("lightning-bolts").locate_file("pl_bolts/optimizers/lr_scheduler.py")
    stability = SimpleNamespace(under_review=lambda: lambda kind: kind)
    monkeypatch.setitem(sys.modules, "pl_bolts.utils.stability", stability)
    make = runpy.run_path(str(file))["LinearWarmupCosineAnnealingLR"]
    theirs = make(optimizer_of(1.0), warmup, 40, warmup_start_lr=START, eta_min=END)
    expected = rates(theirs, 40)
    assert rates(scheduled(Length(warmup, 40)), 40) == pytest.approx(expected, rel=1e-9)


def test_the_rate_of_a_group_is_scaled_in_every_step():
    expected = [0.3 * closed_form(step, 3, 12) for step in range(13)]
    assert rates(scheduled(Length(3, 12), 1.0, 0.3), 12) == pytest.approx(expected, rel=1e-12)


def test_a_run_that_kept_the_peak_falls_from_the_step_that_it_has_reached():
    schedule = scheduled(Length(5, 100), schedule="constant")
    rates(schedule, 29)
    taken = []
    for _ in range(30, 40):  # stopped and resumed before every step
        state = schedule.state_dict()
        schedule = scheduled(Length(5, 40))
        schedule.load_state_dict(state)
        taken += rates(schedule, 0)
    assert taken == pytest.approx([cosine(step / 10) for step in range(10)], rel=1e-12)


@over_table(__file__, "lengths")
def test_a_run_that_becomes_longer_or_shorter_goes_on_at_the_rate_where_it_stands(step, total):
    schedule = scheduled(Length(3, total, LIMITS))
    state = dict(last_epoch=step, length=(5, 40, LIMITS))
    schedule.load_state_dict(schedule.state_dict() | state)
    share, rest = (step - 5) / 35, total - step
    expected = [cosine(share + (1 - share) * after / rest) for after in range(rest + 1)]
    assert rates(schedule, rest) == pytest.approx(expected, rel=1e-9)

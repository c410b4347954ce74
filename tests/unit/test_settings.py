"""Settings as fields of dataclasses; golden files have the messages of real ones, and their lines in the help."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from cait import plugins
from cait.data.datamodule import DataSettings
from cait.errors import UserError
from cait.settings import Group, In, Needs, check_names, group, names_in, rules_of, values
from cait.train.module import ModuleSettings


@dataclass(frozen=True)
class Color(Group):
    white: bool = True
    """Whether white."""


@dataclass(frozen=True)
class Optimizer(Group):
    lr: Annotated[float, In("[0, inf)")] = 1e-3
    """The rate."""
    mode: Annotated[Literal["max", "min"] | None, Needs("a rate", "lr")] = None
    """One of two."""
    mean: Annotated[Sequence[float], In("(-inf, inf)")] = (1.0, 2.0)
    """Numbers."""
    steps: Annotated[int | None, In("[1, 9]")] = None
    """How many."""

    def __post_init__(self):
        super().__post_init__()
        if self.steps == 7:
            raise UserError("seven is no number of steps")


@dataclass(frozen=True)
class Both(Color, Optimizer):
    """All settings."""


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": -1}, "lr must be at least 0, got -1"),
        ({"lr": math.nan}, "lr must be finite, got nan"),
        ({"lr": True}, "lr must be a number, got True"),
        ({"lr": None}, "lr must be a number, got None"),
        ({"mean": [1.0, math.inf]}, "mean must be finite, got .*"),
        ({"mean": "ab"}, "mean must be a number, got 'ab'"),
        ({"mode": "mean"}, "mode must be one of max, min, null, got 'mean'"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"steps": 0}, r"steps must be in \[1, 9\], got 0"),
        ({"steps": 7}, "seven is no number of steps"),
        ({"white": 1}, "white must be true or false, got 1"),
    ],
)
def test_a_wrong_setting_is_refused(settings, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        Both(**settings)


def test_a_wrong_name_is_one_of_the_class_that_takes_it():
    check_names(Color(), Both, {"lr": 1})
    with pytest.raises(UserError, match=r"Color has no setting 'lrr'; did you mean lr\?"):
        check_names(Color(), Both, {"lrr": 1})


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[0, 1]", [0.0, 0.5, 1.0]),
        ("(0, 1]", [0.5, 1.0]),
        ("[0, 1)", [0.0, 0.5]),
        ("(-inf, inf)", [-1.0, 0.0, 0.5, 1.0]),
        ("(0, inf)", [0.5, 1.0]),
        ("(0, inf]", [0.5, 1.0, math.inf]),
    ],
)
def test_a_range_has_its_ends_or_not(text, numbers):
    candidates = [-math.inf, -1.0, 0.0, 0.5, 1.0, math.inf, math.nan]
    assert [number for number in candidates if In(text).holds(number)] == numbers


def test_the_text_of_a_rule_is_for_the_help():
    rules = rules_of(Optimizer)
    assert [rule.help for rule in rules["lr"]] == ["", "range: [0, inf)"]
    assert [rule.help for rule in rules["mode"]] == ["", "needs: a rate"]


def test_the_settings_of_extras_are_among_those_of_the_package():
    for name, settings in {"data": DataSettings, "model": ModuleSettings}.items():
        for added in plugins.groups(name):
            assert {*names_in(added)} <= {*names_in(settings)}
            assert issubclass(added, Group)


def test_a_group_to_plain_values_and_back():
    settings = Both(lr=2, white=False)
    assert values(settings, Color) == {"white": False}
    plain = {"lr": 2, "mode": None, "mean": (1.0, 2.0), "steps": None, "white": False}
    assert values(settings) == plain
    assert group(Both, plain | {"seed": 1}) == settings

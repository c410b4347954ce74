"""Settings: fields of dataclasses, each with its rules in its type and its sentence as a string below it.

    @dataclass(frozen=True)
    class Optimizer(Group):
        lr: NonNegativeFloat = 1e-3
        \"""Peak learning rate.\"""

A class that takes settings passes them on, and the command line follows: `def __init__(self, **settings)` with
`Optimizer(**settings)` in it has `--model.lr`, and its help shows the range.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cait.errors import UserError, did_you_mean

Settings = dict[str, Any]
"""As {"model.fields.depth": 36}."""


class Rule:
    """What holds for the value of a setting."""

    @property
    def help(self) -> str:
        """What `--help` says of it, beside the type."""
        return ""

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if the setting `name` cannot have this value."""


@dataclass(frozen=True)
class OfType(Rule):
    """A plain type, as `int`; None is left to the type of the field."""

    type: type
    is_optional: bool

    def check(self, name: str, value: Any) -> None:
        words, accepted = PLAIN[self.type]
        if value is None and self.is_optional:
            return
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            raise UserError(f"{name} must be {words}, got {value!r}")


PLAIN: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", bool),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a name", str | os.PathLike),
}
"""How an error calls a plain type, and what counts as one in Python."""
NUMBER = OfType(float, is_optional=True)


@dataclass(frozen=True)
class In(Rule):
    """A range of numbers, as "(0, 1]". Each number of a list must be in it. None is always allowed.

    NaN is in no range, and infinity in none that is written as "[0, inf)".
    """

    text: str

    @property
    def help(self) -> str:
        return f"range: {self.text}"

    @functools.cached_property
    def limits(self) -> tuple[float, float]:
        low, high = self.text[1:-1].split(",")
        return float(low), float(high)

    def holds(self, number: float) -> bool:
        low, high = self.limits
        is_above = number >= low if self.text.startswith("[") else number > low
        is_below = number <= high if self.text.endswith("]") else number < high
        return is_above and is_below

    def check(self, name: str, value: Any) -> None:
        for number in listed(value):
            NUMBER.check(name, number)
            if number is not None and not self.holds(number):
                raise UserError(f"{name} must be {self._words(number)}, got {value}")

    def _words(self, number: float) -> str:
        low, high = self.limits
        if high < math.inf:
            return f"in {self.text}"
        if not math.isfinite(number):
            return "finite"
        return f"at least {low:g}" if self.text.startswith("[") else f"above {low:g}"


@dataclass(frozen=True)
class OneOf(Rule):
    """The values of a `Literal`."""

    choices: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        if value not in self.choices:
            raise UserError(
                f"{name} must be one of {', '.join(map(as_text, self.choices))}, got {value!r}"
            )


@dataclass(frozen=True)
class Needs(Rule):
    """What a setting needs of others, without which it would do nothing.

    The command line refuses such a setting, see `cait.guards.refusals.Unused`.
    """

    words: str
    """As "Mixup or CutMix"."""
    others: str
    """Names of settings of the same group, as "mixup cutmix"."""
    is_met: Callable[..., bool] = lambda *values: all(values)
    """Called with the values of the others; by default they must all be on."""

    @property
    def help(self) -> str:
        return f"needs: {self.words}"


PositiveInt = Annotated[int, In("[1, inf)")]
NonNegativeInt = Annotated[int, In("[0, inf)")]
NonNegativeFloat = Annotated[float, In("[0, inf)")]
PositiveFloat = Annotated[float, In("(0, inf)")]
Share = Annotated[float, In("[0, 1]")]
ShareBelow1 = Annotated[float, In("[0, 1)")]


class Group:
    """A frozen dataclass of settings with defaults. Its values are checked when it is made.

    A check of several fields stands in `__post_init__` of a subclass, which begins with `super().__post_init__()`.
    """

    def __post_init__(self) -> None:
        for name, rules in rules_of(type(self)).items():  # type: ignore[arg-type]
            check(name, getattr(self, name), rules)


@functools.cache
def rules_of(kind: Any) -> dict[str, list[Rule]]:
    """The rules of each field of a group."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: rules_in(hints[name]) for name in names_in(kind)}


def rules_in(hint: Any, is_optional: bool = False) -> list[Rule]:
    """The rules that a type has: a plain one, as `int | None`, or a Literal is one, and `Annotated` adds some."""
    if get_origin(hint) is Annotated:
        return [*rules_in(hint.__origin__, is_optional), *hint.__metadata__]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return [OneOf((*choices, None) if is_optional else choices)]
    if hint in PLAIN:
        return [OfType(hint, is_optional)]
    types = get_args(hint)
    if get_origin(hint) in (Union, UnionType) and types[1:] == (NoneType,):
        return rules_in(types[0], is_optional=True)
    return []


def check(name: str, value: Any, rules: Iterable[Rule]) -> None:
    """Raise UserError if a setting cannot have this value."""
    for rule in rules:
        rule.check(name, value)


def check_names(owner: Any, group: Any, settings: Settings) -> None:
    """Raise UserError if the constructor of `owner`, which passes `settings` on to the group, has not one of them."""
    known = names_in(group)
    for name in settings:
        if name not in known:
            raise UserError(
                f"{type(owner).__name__} has no setting {name!r}{did_you_mean(name, known)}"
            )


def group(kind: Any, settings: Mapping[str, Any]) -> Any:
    """The group of type `kind` with the values of its fields among `settings`, defaults for the others."""
    return kind(**{name: settings[name] for name in names_in(kind) if name in settings})


def names_in(kind: Any) -> list[str]:
    """The names of a group's settings."""
    return [field.name for field in fields(kind)]


def values(settings: Any, kind: Any = None) -> Settings:
    """The settings of a group by name; those of `kind`, one of its base classes, if that is given."""
    return {name: getattr(settings, name) for name in names_in(kind or settings)}


def flatten(nested: dict[Any, Any], prefix: str = "") -> Settings:
    """{"model": {"fields": {"depth": 36}}} as {"model.fields.depth": 36}; an empty dictionary is a value."""
    flat: Settings = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def nested(flat: Mapping[str, Any]) -> Settings:
    """What `flatten` has flattened: {"model.fields.depth": 36} as {"model": {"fields": {"depth": 36}}}.

    A group that was None or {} gets what follows; no dictionary of `flat` is changed.
    """
    result: Settings = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        inner = result
        for group in groups:
            inner[group] = {**(inner.get(group) or {})}
            inner = inner[group]
        inner[last] = value
    return result


def listed(value: Any) -> list[Any]:
    """One or several values, or none, as a list."""
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def is_in(name: str, groups: Iterable[str]) -> bool:
    """Whether a setting is one of these, or in one: "a.b.c" is in "a", "a.b" and itself."""
    return any(f"{name}.".startswith(f"{group}.") for group in groups)


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

"""Settings: written once, as the fields of dataclasses, and given by one flat list of names.

A group is a dataclass of defaults, each with its sentence as a string below it, that checks itself in `__post_init__`.
`flat` lets callers, YAML files and the command line give the fields of a constructor's groups by their own names.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from cait import plugins
from cait.errors import UserError, did_you_mean

Settings = dict[str, Any]
"""As {"model.fields.depth": 36}."""
Init = Callable[..., None]


class Given(Settings):
    """All settings of a call by name, defaults and extras' settings included."""


def flat(more: str = "") -> Callable[[Init], Init]:
    """A decorator for a constructor that takes groups: callers give the groups' fields by name.

        @flat()
        def __init__(self, model: Model, optimizer: Optimizer, seed: int = 0, *, given: Given) -> None:

    is called with `lr=1e-3, seed=1`, where `lr` is a field of `Optimizer`. A parameter of the type `Given` gets all
    values. Two groups may share a field, of one type and default. The signature and the docstring list all fields, so
    LightningCLI and `help` show them, and subclasses may pass `**kwargs` on.

    Args:
        more: what extras add groups to, as `cait.plugins.groups` has them. They are checked; `Given` has their values.

    Raises:
        UserError: in the call, there is no such setting, or a group refuses its value; here, two groups disagree.
    """

    def decorate(init: Init) -> Init:
        self_parameter, *parameters = inspect.signature(init).parameters.values()
        types = {name: kind for name, kind in get_type_hints(init).items() if name != "return"}
        added = plugins.groups(more) if more else []
        groups = [*filter(is_dataclass, types.values()), *added]
        settings: dict[str, inspect.Parameter] = {}
        for parameter in parameters:
            kind = types[parameter.name]
            if kind is not Given:
                _join(settings, _parameters(kind) if is_dataclass(kind) else [parameter.replace(annotation=kind)])
        for kind in added:
            _join(settings, _parameters(kind))
        ordered = [setting.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for setting in settings.values()]
        signature = inspect.Signature([self_parameter, *ordered])

        @functools.wraps(init)
        def constructor(self: Any, *args: Any, **named: Any) -> None:
            for name in named.keys() - settings.keys():
                raise UserError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, settings)}")
            bound = signature.bind(self, *args, **named)
            bound.apply_defaults()
            given = Given(bound.arguments)
            del given[self_parameter.name]
            for kind in added:
                group(kind, given)
            init(self, **{name: given if kind is Given else _value(name, kind, given) for name, kind in types.items()})

        described: Any = constructor
        described.__signature__, described.__name__ = signature, "__init__"
        described.__annotations__ = {name: setting.annotation for name, setting in settings.items()}
        described.__doc__ = f"{init.__doc__ or 'Take settings by name.'}\n\nArgs:\n{_sentences(groups)}"
        return constructor

    return decorate


def _sentences(groups: list[Any]) -> str:
    """What is said of each field, as in a docstring."""
    found: dict[str, list[str]] = {}
    for name, sentence in itertools.chain.from_iterable(documented(kind).items() for kind in groups):
        found.setdefault(name, []).append(sentence)
    return "\n".join(f"    {name}: {' '.join(sentences)}" for name, sentences in found.items())


def _value(name: str, kind: Any, given: Given) -> Any:
    return group(kind, given) if is_dataclass(kind) else given[name]


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """The fields of a group, and of groups in it, as keyword parameters."""
    types = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(types[field.name]):
            yield from _parameters(types[field.name])
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=types[field.name],
        )


def _join(settings: dict[str, inspect.Parameter], more: Any) -> None:
    for parameter in more:
        known = settings.setdefault(parameter.name, parameter)
        if (known.default, known.annotation) != (parameter.default, parameter.annotation):
            raise UserError(f"two groups have a setting {parameter.name}, with other types or defaults")


def group(kind: Any, given: Mapping[str, Any]) -> Any:
    """The group of type `kind` with the values of its fields among `given`, defaults for the others."""
    types = get_type_hints(kind)
    nested = {name: group(inner, given) for name, inner in types.items() if is_dataclass(inner)}
    return kind(**nested, **{field.name: given[field.name] for field in fields(kind) if field.name in given})


def values(held: Any) -> Settings:
    """The settings that a group holds, by name, with those of groups in it."""
    found: Settings = {}
    for field in fields(held):
        value = getattr(held, field.name)
        found |= values(value) if is_dataclass(value) else {field.name: value}
    return found


def documented(kind: Any) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name, with those of dataclasses in it."""
    found: dict[str, str] = {}
    bases: list[Any] = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    for base in bases:
        found |= sentences(_classes(base.__module__).get(base.__name__, []))
    for inner in get_type_hints(kind).values():
        found |= documented(inner) if is_dataclass(inner) else {}
    return found


def sentences(body: list[ast.stmt]) -> dict[str, str]:
    """The string below each field in the source of a class, by the field's name."""
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """What the classes of a module consist of; nothing without its source."""
    file = getattr(sys.modules[module], "__file__", None)
    tree = ast.parse(Path(file).read_text() if file else "")
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def save_hyperparameters(module: Any, given: Given) -> None:
    """Lightning's `save_hyperparameters` for a `flat` constructor, called in it.

    It saves `given`, and as usual what a subclass has been given besides.
    """
    # Lightning reads the variables of each constructor's frame by the names in its signature, which here are flat.
    # So it begins above: 0 is this function, 1 the constructor, 2 what `flat` has made of it.
    caller = sys._getframe(3)
    module.save_hyperparameters(given, frame=caller)
    module.save_hyperparameters(frame=caller)


SIZES = {"img_size": 224, "num_classes": 1000, "task": None}
"""The sizes of a module that is given neither, nor a data module that says them."""


def take_from_data(module: Any, data: Any) -> Settings:
    """A LightningModule's `SIZES` from its data module, or None; they and the normalisation join its hyper-parameters.

    Raises:
        UserError: the module was given other sizes, or takes images of other channels.
    """
    sizes: Settings = dict(SIZES)
    for name, default in SIZES.items():
        given, found = module.hparams[name], getattr(data, name, None)
        if None not in (given, found) and given != found:
            raise UserError(f"the module has {name} {given}, the data has {found}: leave it out of the module")
        sizes[name] = given or found or default
    how = getattr(data, "preprocessing", None)
    channels = (module.hparams["fields"] or {}).get("in_chans", 3)
    if how and how.reading.in_chans != channels and not data.has_own_eval_transform:
        raise UserError(
            f"the network has in_chans {channels}, the data module {how.reading.in_chans}: give both the same"
        )
    for hparams in (module.hparams, module._hparams_initial):  # of the checkpoints, of the loggers
        hparams.update(sizes | ({"mean": how.mean, "std": how.std} if how else {}))
    return sizes


def check_at_least(held: Any, least: float, *names: str) -> None:
    """Raise UserError if one of these fields is less, or infinite; None is left out."""
    for name in names:
        value = getattr(held, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name} must be at least {least}{' and finite' * (value == math.inf)}, got {value}")


def check_share(held: Any, *names: str) -> None:
    """Raise UserError if one of these fields is outside [0, 1]."""
    for name in names:
        if not 0 <= getattr(held, name) <= 1:
            raise UserError(f"{name} must be in [0, 1], got {getattr(held, name)}")


def check_choice(held: Any, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UserError if a field is none of its choices."""
    for name, allowed in choices.items():
        if getattr(held, name) not in allowed:
            listed = ", ".join("null" if choice is None else str(choice) for choice in allowed)
            raise UserError(f"{name} must be one of {listed}, got {getattr(held, name)!r}")


def flatten(nested: dict[Any, Any], prefix: str = "") -> Settings:
    """{"model": {"fields": {"depth": 36}}} as {"model.fields.depth": 36}; an empty dictionary is a value."""
    found: Settings = {}
    for key, value in nested.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

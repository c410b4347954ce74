"""Settings: written once, as the fields of dataclasses, and given by one flat list of names.

A group is a dataclass of defaults, each with its sentence as a string below it, that checks itself in `__post_init__`.
`flat` lets callers, YAML files and the command line give the fields of a constructor's groups by their own names.
"""

import copy
import functools
import inspect
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from cait import plugins
from cait.errors import UserError, did_you_mean

Settings = dict[str, Any]
"""As {"model.fields.depth": 36}."""
Init = Callable[..., None]


def flat(more: str = "") -> Callable[[Init], Init]:
    """A decorator for a constructor that takes groups: callers give the groups' fields by name.

        @flat()
        def __init__(self, model: Model, optimizer: Optimizer, seed: int = 0, *, given: Settings) -> None:

    is called with `lr=1e-3, seed=1`, where `lr` is a field of `Optimizer`. `given` gets all values by name. The
    signature and the docstring list all fields, so LightningCLI and `help` show them, and subclasses may pass
    `**kwargs` on.

    Extras add groups to `more`, as `cait.plugins.groups` has them. They are checked; `given` has their values. A call
    raises UserError if there is no such setting, or a group refuses its value.
    """

    def decorate(init: Init) -> Init:
        hints = get_type_hints(init).items()
        kinds = {name: kind for name, kind in hints if name not in ("return", "given")}
        added = plugins.groups(more) if more else []
        settings = _settings(init)
        for kind in added:
            settings |= _settings(kind)
        signature = inspect.Signature([*settings.values()])

        @functools.wraps(init)
        def constructor(self: Any, *args: Any, **named: Any) -> None:
            for name in named.keys() - settings.keys():
                raise UserError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, settings)}")
            bound = signature.bind(self, *args, **named)
            bound.apply_defaults()
            given = {name: value for name, value in bound.arguments.items() if name != "self"}
            for kind in added:
                group(kind, given)
            made = {name: group(kind, given) if is_dataclass(kind) else given[name] for name, kind in kinds.items()}
            init(self, **made, given=given)

        described: Any = constructor
        described.__signature__ = signature
        described.__annotations__ = {name: each.annotation for name, each in settings.items() if name != "self"}
        sentences: dict[str, str] = {}
        for kind in [*reversed(added), *reversed(kinds.values())]:
            if is_dataclass(kind):
                sentences |= documented(kind)
        lines = [f"    {name}: {text}" for name, text in sentences.items()]
        described.__doc__ = "\n".join([f"{init.__doc__ or 'Take settings by name.'}\n\nArgs:", *lines])
        return constructor

    return decorate


def _settings(made: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor, with the fields of a group, and of groups in it, in the place of each group."""
    found: dict[str, inspect.Parameter] = {}
    kinds = get_type_hints(made)
    for name, parameter in inspect.signature(made).parameters.items():
        kind = kinds.get(name, parameter.annotation)  # `self` has no kind
        if is_dataclass(kind):
            found |= _settings(kind)
        elif name != "given":
            found[name] = parameter.replace(annotation=kind, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return found


def group(kind: Any, given: Mapping[str, Any]) -> Any:
    """The group of type `kind` with the values of its fields among `given`, defaults for the others."""
    types = get_type_hints(kind)
    nested = {name: group(inner, given) for name, inner in types.items() if is_dataclass(inner)}
    own = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    return kind(**nested, **own)


def values(held: Any) -> Settings:
    """The settings that a group holds, by name, with those of groups in it."""
    found: Settings = {}
    for field in fields(held):
        value = getattr(held, field.name)
        found |= values(value) if is_dataclass(value) else {field.name: value}
    return found


def documented(kind: Any) -> dict[str, str]:
    """The string below each field of a group, by the field's name, with those of groups in it."""
    from docstring_parser import parse_from_object  # a network and its optimizer do without

    found: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        for field in parse_from_object(base).params:
            found[field.arg_name] = " ".join(str(field.description).split())
    for inner in filter(is_dataclass, get_type_hints(kind).values()):
        found |= documented(inner)
    return found


def save_hyperparameters(module: Any, given: Settings) -> None:
    """Lightning's own would look for them in the constructor's frame, where `flat` has put groups in their place.

    A subclass that takes more calls Lightning's for these: `self.save_hyperparameters("layers")`.
    """
    module.hparams.update(given)
    module._hparams_initial = copy.deepcopy(module.hparams)  # for the loggers
    module._log_hyperparams = True


def take_from_data(module: Any, data: Any) -> Settings:
    """A LightningModule's sizes and task from its data module, or None.

    They and the normalization join its hyper-parameters. Raises UserError if the module was given other sizes, or takes
    images of other channels.
    """
    sizes: Settings = {}
    for name, default in (("img_size", 224), ("num_classes", 1000), ("task", None)):
        given, found = module.hparams[name], getattr(data, name, None)
        if None not in (given, found) and given != found:
            raise UserError(f"the module has {name} {given}, the data has {found}: leave it out of the module")
        sizes[name] = given or found or default
    how = getattr(data, "preprocessing", None)
    channels = (module.hparams["fields"] or {}).get("in_chans", 3)
    if how and how.reading.in_chans != channels and not data.has_own_eval_transform:
        of_both = f"the network has in_chans {channels}, the data module {how.reading.in_chans}"
        raise UserError(f"{of_both}: give both the same")
    normalization = {"mean": how.mean, "std": how.std} if how else {}
    for hparams in (module.hparams, module._hparams_initial):  # of the checkpoints, of the loggers
        hparams.update(sizes | normalization)
    return sizes


def check_range(held: Any, allowed: str, *names: str) -> None:
    """Raise UserError if one of these fields, or a number in a list, is not in a range as "(0, 1]"; None is left out.

    NaN is in no range, and infinity in none that is written as "[0, inf)".
    """
    least, most = allowed[1:-1].split(",")
    above = operator.ge if allowed[0] == "[" else operator.gt
    below = operator.le if allowed[-1] == "]" else operator.lt
    for name in names:
        value = getattr(held, name)
        numbers = value if isinstance(value, list | tuple) else [value]
        for number in numbers if value is not None else ():
            if above(number, float(least)) and below(number, float(most)):
                continue
            words = f"in {allowed}"
            if float(most) == math.inf:
                low = f"{'at least' if above is operator.ge else 'above'} {least}"
                words = low if math.isfinite(number) else "finite"
            raise UserError(f"{name} must be {words}, got {value}")


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
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{name}.")
        else:
            found[name] = value
    return found


def nested(flat: Mapping[str, Any]) -> Settings:
    """What `flatten` has flattened: {"model.fields.depth": 36} as {"model": {"fields": {"depth": 36}}}.

    A group that was None or {} gets what follows; no dictionary of `flat` is changed.
    """
    found: Settings = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        place = found
        for group in groups:
            place[group] = {**(place.get(group) or {})}
            place = place[group]
        place[last] = value
    return found


def is_in(name: str, groups: Iterable[str]) -> bool:
    """Whether a setting is one of these, or in one: "a.b.c" is in "a", "a.b" and itself."""
    return any(f"{name}.".startswith(f"{group}.") for group in groups)


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

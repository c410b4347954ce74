"""What a file holds, as plain values of a known shape: a stranger, or a crash, may have written the file."""

from pathlib import Path
from typing import Any

from cait.errors import UserError, one_line

MOST_VALUES, MOST_LETTERS, DEEPEST, MOST_BITS = 1 << 18, 1 << 26, 50, 63
"""The most that a file may hold: values, letters of all texts, levels, and bits of a whole number."""
TOO_LARGE = f"too large: a file may hold {MOST_VALUES:,} values, {MOST_LETTERS:,} letters or {DEEPEST} levels"

FLOOR, FACTOR = 1 << 28, 16
TOO_MUCH = "would take far more memory than the file"


def most_bytes(size: int) -> int:
    """Bytes that the content of a file may take, by the bytes of the file.

    Whatever unpacks a file asks for this bound before it takes memory.
    """
    return max(FLOOR, FACTOR * size)


def plain(value: Any, source: Path | str, name: str = "", kept: tuple[type, ...] = ()) -> Any:
    """Copy what a file holds into None, bool, int, float, str, lists and dicts: the rest may be made to do harm.

    Every reader of a file calls it before anything looks at the content. Tuples and sets become lists. Objects of the
    types in `kept` stay. A value that stands in several places is counted and copied in each, so that a small file
    cannot stand for much, and nothing holds itself.

    Raises UserError for any other value, and for more than a file may hold. It names the file `source`, and the field
    below `name`.
    """
    values = letters = 0

    def copy(part: Any, name: str, level: int) -> Any:
        nonlocal values
        if not isinstance(part, dict | list | tuple | set | frozenset):
            return check_leaf(part, name, kept)
        values += len(part)
        if values > MOST_VALUES or (part and level == DEEPEST):
            raise _unusable(source, name, TOO_LARGE)
        if not isinstance(part, dict):
            return [copy(item, _joined(name, index), level + 1) for index, item in enumerate(part)]
        return {
            check_leaf(key, name): copy(item, _joined(name, key), level + 1)
            for key, item in part.items()
        }

    def check_leaf(part: Any, name: str, kept: tuple[type, ...] = ()) -> Any:
        nonlocal letters
        if isinstance(part, str):
            letters += len(part)
        if letters > MOST_LETTERS:
            raise _unusable(source, name, TOO_LARGE)
        if isinstance(part, kept) or part is None or isinstance(part, str | float):
            return part
        if not isinstance(part, int):
            raise _unusable(
                source, name, f"neither text nor a number, but of the type {type(part).__name__}"
            )
        if part.bit_length() > MOST_BITS:
            raise _unusable(source, name, f"a whole number of more than {MOST_BITS} bits")
        return part

    return copy(value, name, 0)


def check_shape(value: Any, shape: Any, path: Path, name: str = "") -> None:
    """Raise UserError if a `plain` value has another shape. It names the file `path`, and the field below `name`.

    A shape is a type or several; [shape] of a list's items; {"field": shape}, where "field?" may be missing or None,
    and {...: shape} of all other fields.
    """
    expected = shape
    if isinstance(shape, dict | list):
        expected = type(shape)
    is_wrong_bool = isinstance(value, bool) and expected not in (bool, object)
    if is_wrong_bool or not isinstance(value, expected):
        problem = "missing" if value is None else one_line(repr(value))[:40]
        raise _unusable(path, name, problem)
    if isinstance(shape, list):
        for index, item in enumerate(value):
            item_name = f"{name}[{index}]"
            check_shape(item, shape[0], path, item_name)
    if isinstance(shape, dict):
        fields = {field: None for field in shape if field is not ... and not field.endswith("?")}
        fields.update(value)
        for field, item in fields.items():
            field_shape = _field_shape(field, item, shape)
            check_shape(item, field_shape, path, _joined(name, field))


def _field_shape(field: Any, item: Any, shape: dict[Any, Any]) -> Any:
    """The shape of one field of a dictionary; `object` if the item may be anything."""
    if field in shape:
        return shape[field]
    optional = f"{field}?"
    if optional in shape:
        return object if item is None else shape[optional]
    return shape.get(..., object)


def _joined(name: str, key: Any) -> str:
    """The name of a field within the field `name`."""
    return f"{name}.{key!s:.40}".lstrip(".")


def _unusable(source: Path | str, name: str, problem: str) -> UserError:
    return UserError(f"{source}: {name or 'its content'} cannot be used: it is {problem}")

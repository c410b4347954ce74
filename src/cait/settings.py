"""Settings by their name on the command line."""

from __future__ import annotations

import json
from typing import Any

Settings = dict[str, Any]
"""As {"model.fields.depth": 36}."""


def flatten(nested: dict[Any, Any], prefix: str = "") -> Settings:
    """{"model": {"fields": {"depth": 36}}} as {"model.fields.depth": 36}; an empty dictionary is a value."""
    flat: Settings = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

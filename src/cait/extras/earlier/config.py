"""The configuration of an earlier version's run in today's names."""

from __future__ import annotations

from typing import Any

from cait import plugins

DEFAULTS = {"exif_orientation": False, "background": None}
"""Settings of the data module that earlier runs did not record, and the values that they used."""


def todays(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run's config.yaml: class paths as of today, and what earlier runs did not record."""
    config = _renamed(config, plugins.merged("MOVED"))
    data = config.get("data")
    if isinstance(data, dict) and "max_bad_share" in data:  # a data module of your own may know none of them
        config["data"] = DEFAULTS | data
    return config


def _renamed(value: Any, moved: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, moved) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, moved) for item in value]
    module, dot, name = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    return f"{moved[module]}{dot}{name}" if module in moved else value

"""Measure every layer while a run trains: activations, gradients, LayerScale."""

from pathlib import Path
from typing import Any

FILE = "monitor.csv"
"""In the folder of a run; its columns are step, layer, part, name and value."""


def figures(folder: Path) -> dict[str, Any]:
    """Heat maps of the measured layers of a run."""
    from contrib.monitor.heat_maps import draw

    return draw(folder)

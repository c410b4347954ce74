"""What all figures share: matplotlib without a screen, one style, whole files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from cait import disk
from cait.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from cait.data.transforms import Preprocessing

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
        "figure.dpi": 120,
        "text.parse_math": False,  # a class may be called "$x"
        # Okabe and Ito's colours, which people with colour-blindness can tell apart.
        "axes.prop_cycle": cycler(
            color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
        ),
    }
)


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure of width × height inches and its axes [rows, columns]; `options` are those of `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels(count: int, width: float, height: float, below: float = 0.0, in_a_row: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure and axes of width × height inches each, with room `below` for a legend."""
    columns = min(in_a_row, count)
    rows = math.ceil(count / columns)
    figure, axes = grid(rows, columns, width * columns, height * rows + below)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, list(axes.flat[:count])


def pixels(image: Tensor, preprocessing: Preprocessing) -> np.ndarray:
    """A network's input [C, S, S] as the pixels that it was made of, uint8 [S, S, 3]."""
    mean, std = (np.asarray(values, np.float32) for values in (preprocessing.mean, preprocessing.std))
    values = (image.float().cpu().permute(1, 2, 0).numpy() * std + mean) * 255
    return values.round().clip(0, 255).astype(np.uint8).repeat(3 // values.shape[2], axis=2)


def check(path: Path) -> None:
    """Raise UserError if no format of figures ends a file's name so."""
    if path.suffix[1:] not in (formats := FigureCanvasBase.get_supported_filetypes()):
        raise UserError(f"a figure's file ends with one of .{', .'.join(sorted(formats))}; {path} does not")


def write(figure: Figure, path: Path) -> None:
    """Write the figure whole, in the format that the file's name ends with; one that nobody knows is a UserError."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as beside:
        figure.savefig(beside, format=path.suffix[1:])

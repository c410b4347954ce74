"""What all figures share: matplotlib without a screen, one style, whole files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cait import disk
from cait.errors import UserError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from cait.data.transforms import Preprocessing

SHOWN = "planes: of channels 0, 1 and 2, or 0 alone, the mean ± 2 deviations"
style.use("tableau-colorblind10")
mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
        "figure.dpi": 120,
        "text.parse_math": False,  # a class may be called "$x"
    }
)


def grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A figure of width × height inches and its axes [rows, columns]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def panels(
    count: int, width: float, height: float, below: float = 0.0, in_a_row: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure and axes of width × height inches each, with room `below` for a legend."""
    columns = min(in_a_row, count)
    rows = math.ceil(count / columns)
    figure, axes = grid(rows, columns, width * columns, height * rows + below)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, list(axes.flat[:count])


def pixels(image: Tensor, preprocessing: Preprocessing) -> np.ndarray:
    """A network's input [C, S, S] as the pixels that it was made of, uint8 [S, S, 3]; planes as `SHOWN` says."""
    values = image.float().cpu().permute(1, 2, 0).numpy()
    # a transform of one's own made others
    if preprocessing.reader or len(image) != len(preprocessing.mean):
        values = values[..., : 3 if len(image) >= 3 else 1] / 4 + 0.5
        colors = (255 * values.clip(0, 1)).astype(np.uint8)
    else:
        values = values * np.asarray(preprocessing.std, np.float32) + np.asarray(
            preprocessing.mean, np.float32
        )
        colors = (values * 255).round().clip(0, 255).astype(np.uint8)
    return colors.repeat(3 // colors.shape[2], axis=2)


def write(figure: Figure, path: Path) -> None:
    """Write the figure whole, in the format that the file's name ends with; one that nobody knows is a UserError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with disk.atomic_write(path) as beside:
            figure.savefig(beside, format=path.suffix[1:])
    except ValueError as error:
        raise UserError(
            f"{path}: a figure's file ends with .png, .pdf or .svg: {one_line(error)}"
        ) from error

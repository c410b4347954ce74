"""`cait plot`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cait.cli.options import Options, check_folder, named_run
from cait.errors import UserError
from cait.run import rundir


def plot(arguments: list[str], *others: Any) -> None:
    """Draw the curves of a run, and the figures that other extras draw of it."""
    options = Options("plot", "Draw the curves of a run and, if they were measured, its layers.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--output", type=Path, metavar="DIR", help="default the folder plots/ of the run")
    given = options.parse_args(arguments)
    folder = named_run("plot", given.run)
    from cait import plots, plugins
    from cait.extras.visualize import figures
    from cait.run import curves

    output = given.output or folder / rundir.PLOTS
    check_folder(output)
    logged = curves.read(folder)
    drawn = {"curves": figures.draw_curves({folder.name: logged})}
    for draw in plugins.of_kind("figures"):
        try:
            drawn |= draw(folder)
        except UserError as error:
            print(f"curves alone: {error}")
    for name, figure in drawn.items():
        plots.write(figure, output / f"{name}.png")
    for name in drawn:
        print(os.path.relpath(output / f"{name}.png"))

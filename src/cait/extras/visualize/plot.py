"""`cait plot`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cait.cli.options import Options, check_folder, named_run
from cait.errors import UserError


def plot(arguments: list[str], *others: Any) -> None:
    """Draw the curves of a run and, if it was monitored, the heat maps of its layers."""
    options = Options("plot", "Draw the curves of a run and what its monitor.csv says of its layers.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--output", type=Path, metavar="DIR", help="default the folder plots/ of the run")
    given = options.parse_args(arguments)
    folder = named_run("plot", given.run)
    from cait import plots
    from cait.extras.monitor import measured
    from cait.extras.visualize import figures
    from cait.run import curves

    output = given.output or folder / "plots"
    check_folder(output)
    logged = curves.read(folder)
    try:
        tables = measured.read(folder)
    except UserError as error:
        tables = {}
        print(f"curves alone: {error}")
    drawn = {"curves": figures.draw_curves({folder.name: logged})}
    for name in figures.MAPS:
        if any(name == figure for _, figure in tables):
            drawn[name] = figures.draw_map(tables, name, logged)
    if tables:
        drawn["depth"] = figures.draw_depth(tables, logged)
    for name, figure in drawn.items():
        plots.write(figure, output / f"{name}.png")
    for name in drawn:
        print(os.path.relpath(output / f"{name}.png"))

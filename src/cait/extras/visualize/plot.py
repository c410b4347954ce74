"""`cait plot`: the curves of a run, and the figures that other extras draw of it."""

from __future__ import annotations

import os
from pathlib import Path

from cait import disk
from cait.cli.options import Options, named_run
from cait.errors import UserError
from cait.run.program import Program


def plot(arguments: list[str], program: Program) -> None:
    """Draw the curves of a run and, if they were measured, its layers."""
    options = Options("plot", "Draw the curves of a run and, if they were measured, its layers.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--output", type=Path, metavar="DIR", help="default the folder plots/ of the run")
    given = options.parse_args(arguments)
    folder = named_run("plot", given.run)
    from cait import plugins
    from cait.extras import curves, plots

    output = given.output or folder / "plots"
    disk.check_output(output, folder=True)
    drawn = {"curves": curves.draw({folder.name: curves.read(folder)})}
    for figures in plugins.of_kind("figures"):
        try:
            drawn |= figures(folder)
        except UserError as error:
            print(f"curves alone: {error}")
    for name, figure in drawn.items():
        plots.write(figure, output / f"{name}.png")
        print(os.path.relpath(output / f"{name}.png"))

"""What `cait` was started with: classes and a file of the user's own, and the other processes of the run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cait.run import rundir
from cait.run.processes import Processes

if TYPE_CHECKING:
    from cait.data.datamodule import ImageNetDataModule
    from cait.train.module import CaiTModule


@dataclass
class Program:
    """What every verb is called with, beside its words.

    Args:
        module: a subclass of `CaiTModule` to use in its place.
        data: a subclass of `ImageNetDataModule` to use in its place.
        script: the user's own file that calls `cait.cli.main` with such classes; None under `cait`.
        processes: how this process and the others of a run agree.
        default_name: of a run that neither --run_name nor a configuration names; empty takes the model's name.
    """

    module: type[CaiTModule] | None = None
    data: type[ImageNetDataModule] | None = None
    script: str | None = None
    processes: Processes = field(default_factory=Processes)
    default_name: str = ""

    def command(self, verb: str, folder: Path, options: str = "") -> str:
        """What to type for a verb of a run, as "make resume RUN=mine"."""
        name = rundir.run_argument(folder)
        if self.script:
            return f"python {self.script} {verb} {name} {options}".rstrip()
        return f"make {verb} RUN={name}" + (f' ARGS="{options}"' if options else "")

    def words(self) -> list[str]:
        """The words that start this program again in a process of its own; a verb follows."""
        return [sys.executable, *([self.script] if self.script else ["-m", "cait"])]

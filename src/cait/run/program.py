"""What `cait` was started with: classes and a file of the user's own, and the other processes of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.errors import UserError, one_line, to_type
from cait.run import rundir

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment

    from cait.data.datamodule import ImageNetDataModule
    from cait.train.module import CaiTModule


TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
SRUN = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables that each launcher sets: the number of processes, and those of this one."""


def _check_variables(launcher: str, variables: Sequence[str]) -> None:
    """Raise UserError if one of a launcher's variables is missing or no number, unless the process is alone."""
    count = variables[0]
    for name in variables if os.environ.get(count) != "1" else ():
        value = os.environ.get(name)
        if value is None or not value.isdecimal():
            what = f"lacks {name}" if value is None else f"has {name}={value}"
            raise UserError(f"the environment {what}: start the processes with {launcher}, or unset {count}")


class Processes:
    """One process, or several that only Lightning connects, for training.

    An extra may replace it by a subclass (`PROCESSES` in `cait.plugins`) whose processes also agree before they train
    and end together.
    """

    def cluster(self) -> ClusterEnvironment | None:
        """The launcher of this process: torchrun (also inside SLURM) or SLURM; None if neither started it.

        Raises:
            UserError: the launcher's variables do not fit together.
        """
        if not os.environ.keys() & {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}:  # the usual case; do not import Lightning
            return None
        from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

        if TorchElasticEnvironment.detect():
            _check_variables("torchrun", TORCHRUN)
            return TorchElasticEnvironment()
        if not SLURMEnvironment.detect():
            if (count := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1" and "SLURM_PROCID" in os.environ:
                name = os.environ.get("SLURM_JOB_NAME")  # Lightning takes it for a session: each task would train alone
                raise UserError(f"srun started {count} tasks in a job called {name}; give it another --job-name")
            return None
        _check_variables("srun", SRUN[:1])
        try:  # Lightning would have SLURM save and requeue by itself
            cluster = SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise UserError(one_line(error)) from error
        _check_variables("srun", SRUN)
        return cluster

    def several(self) -> bool:
        """Whether torchrun or SLURM started more than this one process."""
        cluster = self.cluster()
        return cluster is not None and cluster.world_size() > 1

    def agree(self, word: str = "", trouble: str = "") -> list[str]:
        """What each process tells the others, by rank; here [word], as nothing connects them before they train.

        Raises:
            UserError: `trouble` says why this process cannot go on.
        """
        if trouble:
            raise UserError(trouble)
        return [word]

    def of_first(self, make: Callable[[], str]) -> str:
        """What `make` gives in the first process; here each process makes its own."""
        return make()

    def connect(self, trainer: Trainer, settings: Any) -> None:
        """Prepare a Trainer, which has not started yet, for several processes. `settings` are those of `cait fit`."""

    def disconnect(self) -> None:
        """Tell the other processes that this one has finished."""

    def fail(self, error: Exception, line: str | None) -> str | None:
        """End the other processes too after an error; a subclass may end this one at once. Return the line to print.

        `line` is what the user reads about it, None for an error that is not the user's.
        """
        return line


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
        """What to type for a verb of a run, as "make resume RUN=mine" or "cait resume mine"."""
        name = rundir.run_argument(folder)
        if self.script:
            return f"python {self.script} {verb} {name} {options}".rstrip()
        return to_type(
            f"make {verb} RUN={name}" + (f' ARGS="{options}"' if options else ""),
            f"cait {verb} {name} {options}".rstrip(),
        )

"""The processes that train one run together, as torchrun, SLURM or Lightning start them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cait.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment


class Processes:
    """One process, or several that only their collectives connect.

    An extra may put a subclass in its place (`PROCESSES` in `cait.plugins`), whose processes agree before they train
    and end together.
    """

    def cluster(self) -> ClusterEnvironment | None:
        """The launcher of this process: torchrun (also inside SLURM) or SLURM; None if neither started it.

        Raises:
            UserError: SLURM's variables do not fit together.
        """
        if not os.environ.keys() & {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}:  # the usual case; do not import Lightning
            return None
        from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

        if TorchElasticEnvironment.detect():
            return TorchElasticEnvironment()
        try:  # Lightning would have SLURM save and requeue by itself
            return SLURMEnvironment(auto_requeue=False) if SLURMEnvironment.detect() else None
        except RuntimeError as error:
            raise UserError(str(error)) from error

    def several(self) -> bool:
        """Whether torchrun or SLURM started more than this one process."""
        cluster = self.cluster()
        return cluster is not None and cluster.world_size() > 1

    def agree(self, word: str = "", trouble: str = "", round: str = "") -> list[str]:
        """The word of each process by rank; here [word], because nothing connects the processes yet.

        Args:
            word: what this process tells the others.
            trouble: why this process cannot go on; empty if it can.
            round: name of a step before training that only some runs have.

        Raises:
            UserError: on every process as soon as one has trouble.
        """
        if trouble:
            raise UserError(trouble)
        return [word]

    def connect(self, trainer: Trainer, settings: Any, own_timeout: bool) -> None:
        """Prepare `trainer`, which has not started yet, for several processes.

        Args:
            trainer: of the run.
            settings: those of `cait fit`, as the command line has them.
            own_timeout: the strategy brings a time limit of its own.
        """

    def disconnect(self) -> None:
        """Say that this process has ended as it should."""

    def fail(self, error: Exception, line: str | None) -> str | None:
        """End the other processes too, because of `error`; may end this process.

        Args:
            line: what the user reads about it; None for an error that is not the user's.

        Returns:
            the line to end with.
        """
        return line

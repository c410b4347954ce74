"""The processes that train one run together, as torchrun, SLURM or Lightning start them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cait.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment


class Processes:
    """One process, or several that only Lightning connects, for training.

    An extra may replace it by a subclass (`PROCESSES` in `cait.plugins`) whose processes also agree before they train
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

    def agree(self, word: str = "", trouble: str = "") -> list[str]:
        """The words of the processes by rank; [word], because nothing connects the processes before they train.

        Args:
            word: what this process tells the others.
            trouble: why this process cannot go on; empty if it can.

        Raises:
            UserError: there is trouble.
        """
        if trouble:
            raise UserError(trouble)
        return [word]

    def connect(self, trainer: Trainer, settings: Any, own_timeout: bool) -> None:
        """Prepare a Trainer for several processes.

        Args:
            trainer: of the run; it has not started yet.
            settings: those of `cait fit`, as the command line has them.
            own_timeout: whether the strategy brings a time limit of its own.
        """

    def disconnect(self) -> None:
        """Tell the other processes that this one has finished."""

    def fail(self, error: Exception, line: str | None) -> str | None:
        """End the other processes too after an error. A subclass may end this process at once.

        Args:
            error: what ended this process's run.
            line: what the user reads about it; None for an error that is not the user's.

        Returns:
            the line to print.
        """
        return line

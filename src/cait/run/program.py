"""What `cait` was started with: classes and a file of the user's own, and the other processes of the run."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import references
from cait.errors import OtherEndedError, UserError, one_line, to_type
from cait.run import rundir
from cait.settings import Settings

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

    from cait.data.datamodule import ImageNetDataModule
    from cait.train.module import CaiTModule


WAIT = timedelta(minutes=30)
"""How long a process waits for the others before they train; Lightning's limit for what comes later is the same."""


class Processes:
    """This process and the others of one run, and how they were started: nobody else asks the environment.

    Those that torchrun or SLURM started exchange words before they train, through the store by which torch connects
    them later. Lightning starts the others of a machine by the command line of the first, when that one begins to
    train. They are not connected until then: each answers for itself.
    """

    _store: Store | None = None

    def cluster(self) -> ClusterEnvironment | None:
        """The launcher of this process: torchrun (also inside SLURM) or SLURM; None if neither started it.

        Raises UserError if SLURM has several tasks, and srun did not start this process as one of them.
        """
        # the usual case; do not import Lightning
        if not os.environ.keys() & {
            "TORCHELASTIC_RUN_ID",
            "SLURM_NTASKS",
        }:
            return None
        from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

        if TorchElasticEnvironment.detect():
            return TorchElasticEnvironment()
        # Lightning takes all of a job called "interactive", as salloc calls its own, for a shell, also srun's tasks.
        if not SLURMEnvironment.detect() and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
            return None
        # Neither a shell of salloc nor a batch script is a task; an interactive shell may be the one task of a step.
        is_task = "SLURM_PROCID" in os.environ and os.environ.get("ENVIRONMENT") != "BATCH"
        tasks = os.environ["SLURM_NTASKS"]
        if os.environ.get("SLURM_STEP_NUM_TASKS", tasks if is_task else "1") != tasks:
            raise UserError(
                "SLURM has several tasks and this is none: start it with srun, or unset SLURM_NTASKS"
            )
        try:
            # Lightning would have SLURM save and requeue by itself
            return SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise UserError(one_line(error)) from error

    def started(self) -> int:
        """How many processes torchrun or SLURM has started, on all nodes; 1 if neither did."""
        cluster = self.cluster()
        return cluster.world_size() if cluster else 1

    def rank(self) -> int:
        """Which process of the run this one is, whoever started it."""
        cluster = self.cluster()
        return cluster.global_rank() if cluster else int(os.environ.get("LOCAL_RANK", 0))

    def is_launched(self) -> bool:
        """Whether this process is one of several that were started alike, by a launcher or by Lightning."""
        return "LOCAL_RANK" in os.environ or self.started() > 1

    def follow_launcher(self, trainer: Any) -> None:
        """Take the number of processes from torchrun or SLURM, where the Trainer's settings ask for one or for "auto".

        A recipe for one device would train as many times, in one folder.
        """
        started = self.started()
        if started == 1:
            return
        nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
        for name, number in (("devices", started // nodes), ("num_nodes", nodes)):
            if str(trainer[name]) in ("1", "auto"):
                trainer[name] = number

    def agree(self, word: str = "") -> list[str]:
        """The words of all processes, by rank. All call it equally often, and each waits for all."""
        cluster = self.cluster()
        if not cluster or cluster.world_size() == 1:
            return [word]
        try:
            self._store = self._store or _open_store(cluster)
            return _exchange(self._store, word, cluster.global_rank(), cluster.world_size())
        except RuntimeError as error:  # torch's errors of the network
            raise OtherEndedError(
                f"another process of the run cannot be reached at {cluster.main_address}:{cluster.main_port}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns in the first process that can be reached."""
        makes = self.rank() == 0 or self.started() == 1
        return self.agree(make() if makes else "")[0]


def _exchange(store: Store, word: str, rank: int, size: int) -> list[str]:
    """The words of all processes, by rank."""
    number = store.add(f"cait/agreements of {rank}", 1)
    key = f"cait/agreement {number}"
    store.set(f"{key}/{rank}", word)
    words = store.multi_get([f"{key}/{other}" for other in range(size)])
    readers = store.add(f"{key}/read", 1)
    if readers == size:
        store.set(f"{key}/all have read", "")
    if rank == 0:  # it serves the store, so it may not end before
        store.wait([f"{key}/all have read"])
    return [other.decode() for other in words]


def _open_store(cluster: ClusterEnvironment) -> Store:
    """Connect to the store by which torch will connect the processes too.

    Raises UserError if torchrun may start them again: its store would give them the addresses of the killed ones.
    """
    from torch.distributed import rendezvous

    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            f"torchrun's --max-restarts {restarts} needs a new store for each start: give torchrun the variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv_backend c10d"
        )
    # as in SLURM
    os.environ |= {
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": str(cluster.main_port),
    }
    store, _, _ = next(
        rendezvous("env://", cluster.global_rank(), cluster.world_size(), timeout=WAIT)
    )
    return store


class NextRun(BaseException):
    """Raised from a hook, in all processes: leave this run as it is saved, and go on with the one in `folder`.

    It is no error, and no exit.

    Args:
        is_new: whether that run begins.
        layers: its settings if it is new, else what is given to it now.
    """

    def __init__(self, folder: Path, is_new: bool, *layers: Settings) -> None:
        super().__init__(folder)
        self.folder = folder
        self.is_new = is_new
        self.layers = layers


@dataclass
class Program:
    """What every verb is called with, beside its words.

    Args:
        module: a subclass of `CaiTModule` to use in its place.
        data: a subclass of `ImageNetDataModule` to use in its place.
        script: the user's own file of code that calls `cait.cli.main` with such classes; None under a command.
        processes: how this process and the others of a run agree.
        default_name: of a run that neither --run_name nor a configuration names; empty takes the model's name.
        begun: when it was started, as `time.monotonic` has it.
    """

    module: type[CaiTModule] | None = None
    data: type[ImageNetDataModule] | None = None
    script: str | None = None
    processes: Processes = field(default_factory=Processes)
    default_name: str = ""
    begun: float = field(default_factory=time.monotonic)

    def take_class(self, name: str, path: str) -> None:
        """Use the class at `path`, as the setting `name` says, unless `main` was given another.

        Raises UserError if it is none, or of another kind.
        """
        from cait.data.datamodule import ImageNetDataModule
        from cait.train.module import CaiTModule

        if name == "module":
            self.module = self.module or references.subclass(path, CaiTModule)
        else:
            self.data = self.data or references.subclass(path, ImageNetDataModule)

    def data_overrides(self, *names: str) -> list[str]:
        """Those of the methods of `ImageNetDataModule` that the user's data module replaces."""
        if self.data is None:
            return []
        from cait.data.datamodule import ImageNetDataModule

        return references.overridden(self.data, ImageNetDataModule, *names)

    def command(self, verb: str, folder: Path, options: str = "") -> str:
        """What to type for a verb of a run, as "make resume RUN=mine" or "cait resume mine"."""
        name = shlex.quote(rundir.run_argument(folder))
        words = f"{verb} {name} {options}".rstrip()
        if self.script:
            return f"python {shlex.quote(self.script)} {words}"
        make = f"make {verb} RUN={name}"
        if options:
            make += f' ARGS="{options}"'
        return to_type(make, f"cait {words}")

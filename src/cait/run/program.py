"""What `cait` was started with: classes and a file of the user's own, and the other processes of the run."""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import references
from cait.errors import COMMAND, OtherEndedError, UserError, tell, to_type
from cait.run import rundir
from cait.settings import Settings

if TYPE_CHECKING:
    from datetime import timedelta

    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

    from cait.data.datamodule import ImageNetDataModule
    from cait.run.meeting import Message
    from cait.train.module import CaiTModule


class Processes:
    """This process and the others of one run, and how they were started: nobody else asks the environment.

    Those that torchrun or SLURM started exchange words before they train, through the store by which torch connects
    them later. Lightning starts the others of a machine by the command line of the first, when that one begins to
    train. They are not connected until then: each answers for itself.
    """

    _store: Store | None = None
    _last_messages: list[Message] | None = None
    """Of the meeting at which a process has said that it ends; empty if this one could not reach the others."""

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

        # Lightning asks the job's name alone; what srun must start is known here
        warnings.filterwarnings("ignore", message="The `srun` command is available")
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
        if tasks != "1" and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise UserError(
                f"SLURM has {tasks} tasks, and --ntasks-per-node does not say how many on a node: "
                "give it to salloc, sbatch or srun in place of --ntasks (-n)"
            )
        # Lightning would have SLURM save and requeue by itself
        return SLURMEnvironment(auto_requeue=False)

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
        """The words of all processes, by rank. All call it equally often, and each waits for all.

        Raises OtherEndedError if one of them ends, or cannot be reached.
        """
        cluster = self.cluster()
        if not cluster or cluster.world_size() == 1:
            return [word]
        from cait.run import meeting

        messages = self._meet(cluster, word=word)
        if line := meeting.last_line(messages):
            self._last_messages = messages
            raise OtherEndedError(line)
        return [sent.word for sent in messages]

    def end(self, line: str) -> None:
        """Print why this process ends. Before they train the others learn it, and one prints the lines of all."""
        messages = self._last_meeting(line)
        if not messages:
            tell(f"{COMMAND.get()}: error: {line}")
            return
        from cait.run import meeting

        rank = self.rank()
        if meeting.speaks(messages, rank):
            tell(f"{COMMAND.get()}: error: {meeting.last_line(messages)}")
        # With the first to exit a launcher may end the others: by then the line is out, and the cause exits first.
        time.sleep(0.5 if messages[rank].error else 1.5)

    def _last_meeting(self, line: str) -> list[Message]:
        """What the processes say at the meeting at which this one ends; empty if they do not meet any more."""
        if self._last_messages is None:
            self._last_messages = []
            distributed = sys.modules.get("torch.distributed")
            # once they are connected, those who wait for this one see that it has gone
            is_connected = distributed is not None and distributed.is_initialized()
            with suppress(UserError):
                cluster = None if is_connected else self.cluster()
                if cluster and cluster.world_size() > 1:
                    self._last_messages = self._meet(cluster, error=line)
        return self._last_messages

    def _meet(self, cluster: ClusterEnvironment, word: str = "", error: str = "") -> list[Message]:
        """What all processes say. This one says a word and goes on, or an error and ends."""
        from cait.run import meeting

        wait = meeting.LAST_WAIT if error else meeting.WAIT
        try:
            self._store = self._store or _open_store(cluster, wait)
            size = cluster.world_size()
            return meeting.meet(self._store, cluster.global_rank(), size, word, error, wait)
        except RuntimeError as problem:  # torch's errors of the network
            self._last_messages = []
            raise OtherEndedError(
                f"another process of the run cannot be reached at {cluster.main_address}:{cluster.main_port}: "
                f"{str(problem).splitlines()[0]}"
            ) from problem

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns in the first process that can be reached."""
        makes = self.rank() == 0 or self.started() == 1
        return self.agree(make() if makes else "")[0]


def _open_store(cluster: ClusterEnvironment, wait: timedelta) -> Store:
    """Connect to the store by which torch will connect the processes too.

    Raises UserError if torchrun may start them again: its store would give them the addresses of the killed ones.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and is_of_agent:
        raise UserError(
            f"torchrun's --max-restarts {restarts} needs a new store for each start: give torchrun the variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv_backend c10d"
        )
    # as in SLURM
    os.environ |= {
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": str(cluster.main_port),
    }
    from cait.run import meeting

    serves = cluster.global_rank() == 0 and not is_of_agent
    return meeting.connect(cluster.main_address, cluster.main_port, serves, wait)


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

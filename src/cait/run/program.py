"""What `cait` was started with: classes and a file of the user's own, and the other processes of the run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.errors import UserError, one_line, to_type
from cait.run import rundir

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

    from cait.data.datamodule import ImageNetDataModule
    from cait.train.module import CaiTModule


TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
SRUN = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables that each launcher sets: the number of processes, and those of this one."""
WAIT = timedelta(minutes=30)
"""How long a process waits for the others before they train; Lightning's limit for what comes later is the same."""
LINGER = timedelta(minutes=1)
"""How long a process that ends stays for the others to read why."""
PATIENCE = timedelta(seconds=5)
"""How long a process tries a port at which nobody may answer."""


def _check_variables(launcher: str, variables: Sequence[str]) -> None:
    """Raise UserError if one of a launcher's variables is missing or no number, unless the process is alone."""
    count = variables[0]
    for name in variables if os.environ.get(count) != "1" else ():
        value = os.environ.get(name)
        if value is None or not value.isdecimal():
            what = f"lacks {name}" if value is None else f"has {name}={value}"
            raise UserError(f"the environment {what}: start the processes with {launcher}, or unset {count}")


class Processes:
    """This process and the others that torchrun or SLURM started to train one run.

    They exchange words before they train, through the store by which torch connects them later. Processes that only
    Lightning starts are on one machine, and are not connected yet: each answers for itself.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._agreements = 0
        self._starting = True
        """Whether the others will hear from this process once more before they train."""

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
        """What each process tells the others, by rank. All call it equally often, and each waits for all.

        Raises:
            UserError: on every process, if one has `trouble`, which says why it cannot go on.
        """
        cluster = self.cluster()
        if cluster is None or cluster.world_size() == 1:
            told = [[word, trouble]]
        else:
            try:
                told = self._exchange(cluster, word, trouble)
            except RuntimeError as error:  # torch's errors of the network
                place = f"{cluster.main_address}:{cluster.main_port}"
                raise UserError(f"cannot reach the other processes at {place}: {str(error).splitlines()[0]}") from error
        for _, found in told:
            if found:
                self._starting = False  # all have heard it
                raise UserError(found)
        return [word for word, _ in told]

    def _exchange(
        self, cluster: ClusterEnvironment, word: str, trouble: str, wait: timedelta = WAIT
    ) -> list[list[str]]:
        """[word, trouble] of each process."""
        from torch.distributed import PrefixStore

        rank, size = cluster.global_rank(), cluster.world_size()
        self._store = self._store or _open_store(cluster, wait)
        self._store.set_timeout(wait)
        store = PrefixStore(f"cait/agreement {self._agreements}", self._store)
        self._agreements += 1
        if trouble:
            trouble = f"process {rank} on {socket.gethostname()}: {trouble}"
        store.set(str(rank), json.dumps([word, trouble]))
        told = [json.loads(each) for each in store.multi_get([str(other) for other in range(size)])]
        if store.add("read", 1) == size:
            store.set("all have read", "")
        if rank == 0:  # it serves the store, so it may not end before
            store.wait(["all have read"])
        return told

    def of_first(self, make: Callable[[], str]) -> str:
        """What `make` gives in the first process."""
        cluster = self.cluster()
        return self.agree(make() if cluster is None or cluster.global_rank() == 0 else "")[0]

    def compare(self, facts: Mapping[str, str]) -> None:
        """Call it last before training, with what all processes must have alike.

        Raises:
            UserError: on every process, about the first fact that one of them, perhaps on another machine, has not.
        """
        told = [json.loads(word) for word in self.agree(json.dumps([socket.gethostname(), dict(facts)]))]
        self._starting = False
        first_host, first = told[0]
        for rank, (host, own) in enumerate(told):
            for name in [*first, *own]:
                if own.get(name) != first.get(name):
                    raise UserError(
                        f"process {rank} on {host} has {name} {own.get(name)}, process 0 on {first_host} "
                        f"{first.get(name)}: all processes of a run need the same data, code and settings"
                    )

    def tell(self, trouble: str) -> None:
        """Tell the other processes, which wait for this one before they train, why it ends."""
        with contextlib.suppress(RuntimeError, UserError):  # they are gone, or the launcher's variables are the trouble
            cluster = self.cluster()
            if self._starting and cluster is not None and cluster.world_size() > 1:
                self._exchange(cluster, "", trouble, LINGER)


def _open_store(cluster: ClusterEnvironment, wait: timedelta) -> Store:
    """Connect to a store that process 0 serves for this start alone. `torch.distributed` will use it too."""
    from torch.distributed import TCPStore

    address, port, is_first = cluster.main_address, cluster.main_port, cluster.global_rank() == 0
    common: dict[str, Any] = dict(timeout=wait, multi_tenant=True, wait_for_workers=False)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(address, port, is_master=is_first, **common)
    # torchrun's own store outlives the processes. After a restart it still holds the addresses of those that were
    # killed, and Gloo and NCCL would connect to them. So it only says at which port process 0 serves another.
    torchruns = TCPStore(address, port, **common)
    if is_first:
        store = TCPStore(address, 0, is_master=True, **common)
        torchruns.set("cait/port", str(store.port))
    else:
        end = time.monotonic() + wait.total_seconds()
        while True:
            try:
                store = TCPStore(address, int(torchruns.get("cait/port")), **common | {"timeout": PATIENCE})
                break
            except RuntimeError:  # a port of the start before, where nobody answers any more
                if time.monotonic() > end:
                    raise
    os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


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

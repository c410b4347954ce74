"""Processes that torchrun or SLURM started agree before they train, then watch each other, and end together."""

from __future__ import annotations

import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from cait.errors import UserError, kind_and_place
from cait.extras.watch.watch import Watch, is_of_the_network, say
from cait.run.processes import Processes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment

WAIT = 1800.0
"""Seconds to wait for the other processes to start."""
LINGER = 60.0
"""Seconds that process 0, which has the store, stays after an error, so that the others can read it."""

_COMMON: dict[str, Any] = {"timeout": timedelta(seconds=WAIT), "multi_tenant": True, "wait_for_workers": False}


class WatchedProcesses(Processes):
    """Processes that exchange words through a store before they train, and signs of life while they do."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        """The watch over the processes that train together, however they were started; set once they are connected."""
        self._rounds = ["start", "folder", "check", "fit"]
        """The steps of a start that are still to come, in which all processes agree."""
        self._store: Any = None

    def agree(self, word: str = "", trouble: str = "", round: str = "") -> list[str]:
        """Wait for all processes and return the word of each, by rank; [word] if this process is alone.

        All processes call it equally often. A process that cannot go on says why in `trouble`.

        Raises:
            UserError: on every process as soon as one has trouble, with the message of the first.
        """
        cluster = self.cluster()
        if cluster is None or cluster.world_size() == 1:
            if trouble:
                raise UserError(trouble)
            return [word]
        try:
            if round:
                self._rounds.insert(0, round)
            return self._agree(cluster, word, trouble)
        except RuntimeError as error:  # torch's errors of the network
            place = f"{cluster.main_address}:{cluster.main_port}"
            raise UserError(f"cannot reach the other processes at {place}: {str(error).splitlines()[0]}") from error

    def _agree(self, cluster: ClusterEnvironment, word: str, trouble: str) -> list[str]:
        from torch.distributed import PrefixStore

        rank, size = cluster.global_rank(), cluster.world_size()
        store = PrefixStore(f"cait/{self._rounds.pop(0)}", self._open(cluster))
        if trouble:
            store.compare_set("trouble", "", f"process {rank} on {socket.gethostname()}: {trouble}")
        store.set(f"word {rank}", word)
        store.add("arrived", 1)
        _wait(lambda: store.check(["trouble"]) or store.add("arrived", 0) == size, WAIT)
        if not store.check(["trouble"]):
            if (arrived := store.add("arrived", 0)) < size:
                raise UserError(f"only {arrived} of {size} processes started within {WAIT / 60:.0f} minutes")
            return [store.get(f"word {other}").decode() for other in range(size)]
        told = store.get("trouble").decode()
        self._rounds.clear()
        store.add("told", 1)
        if rank == 0:
            _wait(lambda: store.add("told", 0) == size, LINGER)
        raise UserError(told)

    def _open(self, cluster: ClusterEnvironment) -> Any:
        """The store that process 0 serves and that `torch.distributed` will use too."""
        from torch.distributed import TCPStore

        if self._store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._store = _replace_torchruns(cluster)
            os.environ |= {"MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        elif self._store is None:
            self._store = TCPStore(
                cluster.main_address, cluster.main_port, **_COMMON, is_master=cluster.global_rank() == 0
            )
        return self._store

    def connect(self, trainer: Trainer, settings: Any, own_timeout: bool) -> None:
        from cait.extras.watch import connection

        connection.watch(self, trainer, settings.collective_timeout_minutes, settings.silence_seconds, own_timeout)

    def disconnect(self) -> None:
        if self.watch:
            self.watch.stop()
            self.watch = None

    def fail(self, error: Exception, line: str | None) -> str | None:
        """Say the first cause once, and nothing about the connections that broke after it."""
        if self.watch:
            self._end(self.watch, error, line)
        if line is None or not self._rounds or not self.several():
            return line
        try:
            self.agree(trouble=line)
        except UserError as first:
            return str(first)
        return line

    def _end(self, watch: Watch, error: Exception, line: str | None) -> NoReturn:
        if line is not None:
            says, status = watch.fail(line, 2), 2
        elif is_of_the_network(error):
            trouble, says = watch.blame(error)
            line, status = trouble.text, trouble.status
        else:
            says, status = watch.fail(kind_and_place(error)), 1
        if says and line is not None:
            say(line)
        elif says:
            traceback.print_exception(error)
        watch.leave(status)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _replace_torchruns(cluster: ClusterEnvironment) -> Any:
    """A store for this start only.

    torchrun's store outlives the processes. After a restart it still holds the addresses of killed processes, and
    Gloo and NCCL would connect to them. So process 0 offers a port of its own through torchrun's store. The offer
    repeats each process's greeting, so that nobody takes an old offer for the new one.
    """
    from torch.distributed import PrefixStore, TCPStore

    rank, size = cluster.global_rank(), cluster.world_size()
    torchruns = PrefixStore("cait", TCPStore(cluster.main_address, cluster.main_port, **_COMMON))
    if rank > 0:
        greeting = uuid.uuid4().hex
        torchruns.set(f"greeting {rank}", greeting)
        _wait(lambda: greeting in torchruns.get("offer").decode(), WAIT)
        store = TCPStore(cluster.main_address, int(torchruns.get("offer").decode().split()[0]), **_COMMON)
        store.add("heard", 1)
        return store
    store = TCPStore(cluster.main_address, 0, is_master=True, **_COMMON)

    def heard_by_all() -> bool:
        keys = [f"greeting {other}" for other in range(1, size)]
        greetings = [torchruns.get(key).decode() for key in keys if torchruns.check([key])]
        torchruns.set("offer", " ".join([str(store.port), *greetings]))
        return store.add("heard", 0) == size - 1

    _wait(heard_by_all, WAIT)
    return store

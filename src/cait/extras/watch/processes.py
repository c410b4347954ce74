"""Processes that torchrun, SLURM or Lightning started agree before they train, then watch each other.

Every verb loads this file, so it imports torch, Lightning and the files beside it where it uses them.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from cait.errors import UserError, kind_and_place, one_line
from cait.run.program import Processes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

    from cait.extras.watch.watch import Watch

WAIT = 1800.0
"""Seconds to wait for the other processes to start."""
STORE: dict[str, Any] = {"timeout": timedelta(seconds=WAIT), "multi_tenant": True, "wait_for_workers": False}
LINGER = 60.0
"""Seconds that process 0, which serves the store, stays after an error, so that the others can read it."""


class WatchedProcesses(Processes):
    """Processes that exchange words through a store before they train, and signs of life while they do."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        """The watch over the processes that train together, however they were started; set once they are connected."""
        self._store: Store | None = None
        self._agreements = 0
        """How often the processes have agreed."""
        self._starting = True
        """Whether the processes will agree once more. There they learn that one of them cannot start."""

    def agree(self, word: str = "", trouble: str = "") -> list[str]:
        """Wait for all processes, which call it equally often, and return the word of each, by rank.

        Raises:
            UserError: on every process as soon as one has trouble, with the message of the first.
        """
        cluster = self.cluster()
        if cluster is None or cluster.world_size() == 1:
            return super().agree(word, trouble)
        try:
            return self._agree(cluster, word, trouble)
        except RuntimeError as error:  # torch's errors of the network
            place = f"{cluster.main_address}:{cluster.main_port}"
            raise UserError(f"cannot reach the other processes at {place}: {str(error).splitlines()[0]}") from error

    def _agree(self, cluster: ClusterEnvironment, word: str, trouble: str) -> list[str]:
        from torch.distributed import PrefixStore

        rank, size = cluster.global_rank(), cluster.world_size()
        self._store = self._store or _open_store(cluster)
        store = PrefixStore(f"cait/agreement {self._agreements}", self._store)
        self._agreements += 1
        if trouble:
            store.compare_set("trouble", "", f"process {rank} on {socket.gethostname()}: {trouble}")
        store.set(f"word {rank}", word)
        store.add("arrived", 1)
        _wait_until(lambda: store.check(["trouble"]) or store.add("arrived", 0) == size, WAIT)
        if store.check(["trouble"]):
            first = store.get("trouble").decode()
            self._starting = False
            store.add("informed", 1)
            if rank == 0:
                _wait_until(lambda: store.add("informed", 0) == size, LINGER)
            raise UserError(first)
        if (arrived := store.add("arrived", 0)) < size:
            raise UserError(f"only {arrived} of {size} processes started within {WAIT / 60:.0f} minutes")
        return [store.get(f"word {other}").decode() for other in range(size)]

    def of_first(self, make: Callable[[], str]) -> str:
        cluster = self.cluster()
        return self.agree(make() if cluster is None or cluster.global_rank() == 0 else "")[0]

    def connect(self, trainer: Trainer, settings: Any) -> None:
        """Have the processes of `trainer` watch each other from their first connection on.

        Raises:
            UserError: `silence_seconds` is not above 0.
        """
        silence = settings.silence_seconds
        if silence is not None and not silence > 0:
            raise UserError(f"silence_seconds must be above 0 or null, got {silence}")
        if trainer.world_size == 1:
            return
        allow_sockets()  # also where Lightning started the processes
        import torch.distributed as dist

        from cait.extras.watch.watch import Place, Watch

        strategy = trainer.strategy
        connect = strategy.setup_environment

        def connect_and_watch() -> None:
            strategy.setup_environment = connect  # type: ignore[method-assign]  # for what comes after this fit
            self.agree()
            self._starting = False
            if trainer.global_rank > 0:  # process 0 serves the store, and would keep a socket for each of the others
                self._store = None
            try:
                connect()
            except dist.DistError as error:
                raise UserError(f"cannot reach the other processes: {one_line(error)}") from error
            store = dist.PrefixStore("cait/watch", dist.distributed_c10d._get_default_store().clone())
            children = getattr(strategy.launcher, "procs", ())
            place = Place(trainer.global_rank, trainer.world_size, trainer.local_rank, children)
            self.watch = Watch(store, place, math.inf if silence is None else silence)
            self.watch.start()
            _silence_lightnings_observer()

        strategy.setup_environment = connect_and_watch  # type: ignore[method-assign]

    def disconnect(self) -> None:
        if self.watch:
            self.watch.stop()
            self.watch = None

    def fail(self, error: Exception, line: str | None) -> str | None:
        """Print the first cause once, and a line about a connection that broke after it."""
        if self.watch:
            self._end(self.watch, error, line)
        if line is None or not self._starting or not self.several():
            return line
        try:
            self.agree(trouble=line)
        except UserError as first:
            return str(first)
        return line

    def _end(self, watch: Watch, error: Exception, line: str | None) -> NoReturn:
        from cait.extras.watch.watch import LINGER, PATIENCE, is_of_the_network, print_error

        status = 2 if line else 1
        if line is None and is_of_the_network(error):
            # Process 0 knows who is silent. Another that tells the cause meanwhile ends this one.
            time.sleep(PATIENCE + LINGER * (watch.place.rank > 0))
            line = watch.silent(PATIENCE - 2) or f"the connection between the processes broke: {one_line(error)}"
        if watch.is_first():
            print_error(line) if line else traceback.print_exception(error)
            watch.tell(line or kind_and_place(error), status)
        else:
            time.sleep(LINGER)
        watch.leave(status)


def _open_store(cluster: ClusterEnvironment) -> Store:
    """Connect to the store that process 0 serves. `torch.distributed` will use it too."""
    from torch.distributed import TCPStore

    allow_sockets()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _replace_torchruns(cluster)
        os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return store
    return TCPStore(cluster.main_address, cluster.main_port, **STORE, is_master=cluster.global_rank() == 0)


def allow_sockets() -> None:
    """Take all file descriptors that this process may have. The usual 1024 are too few for process 0 of 300.

    It holds a socket for each store of each process: of `torch.distributed`, of the watch, and at first of `agree`.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses to lift it altogether
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds, but no longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _replace_torchruns(cluster: ClusterEnvironment) -> Any:
    """A store for this start only.

    torchrun's store outlives the processes. After a restart it still holds the addresses of killed processes, and
    Gloo and NCCL would connect to them. So process 0 offers a port of its own through torchrun's store. The offer
    repeats each process's greeting, so that no process takes an old offer for the new one.
    """
    from torch.distributed import PrefixStore, TCPStore

    rank, size = cluster.global_rank(), cluster.world_size()
    torchruns = PrefixStore("cait", TCPStore(cluster.main_address, cluster.main_port, **STORE))
    if rank > 0:
        greeting = uuid.uuid4().hex
        torchruns.set(f"greeting {rank}", greeting)
        _wait_until(lambda: greeting in torchruns.get("offer").decode(), WAIT)
        store = TCPStore(cluster.main_address, int(torchruns.get("offer").decode().split()[0]), **STORE)
        store.add("connected", 1)
        return store
    store = TCPStore(cluster.main_address, 0, is_master=True, **STORE)

    def all_connected() -> bool:
        keys = [f"greeting {other}" for other in range(1, size)]
        greetings = [torchruns.get(key).decode() for key in keys if torchruns.check([key])]
        torchruns.set("offer", " ".join([str(store.port), *greetings]))
        return store.add("connected", 0) == size - 1

    _wait_until(all_connected, WAIT)
    return store


def _silence_lightnings_observer() -> None:
    """Lightning would kill this process within 5 s after one that it started fails, before it can say why."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []

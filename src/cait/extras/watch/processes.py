"""Processes that torchrun, SLURM or Lightning started agree before they train, then watch each other, and end together.

Named in `PROCESSES`, so loaded with every verb: torch, Lightning and the files beside this one are imported where they
are used.
"""

from __future__ import annotations

import math
import socket
import threading
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from cait.errors import UserError, kind_and_place, one_line
from cait.run.program import Processes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

    from cait.extras.watch.watch import Place, Watch

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
        """Wait for all processes and return the word of each, by rank; [word] if this process is alone.

        All processes call it equally often. A process that cannot go on says why in `trouble`.

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

        from cait.extras.watch.store import WAIT, open_store, wait_until

        rank, size = cluster.global_rank(), cluster.world_size()
        self._store = self._store or open_store(cluster)
        store = PrefixStore(f"cait/agreement {self._agreements}", self._store)
        self._agreements += 1
        if trouble:
            store.compare_set("trouble", "", f"process {rank} on {socket.gethostname()}: {trouble}")
        store.set(f"word {rank}", word)
        store.add("arrived", 1)
        wait_until(lambda: store.check(["trouble"]) or store.add("arrived", 0) == size, WAIT)
        if store.check(["trouble"]):
            first = store.get("trouble").decode()
            self._starting = False
            store.add("informed", 1)
            if rank == 0:
                wait_until(lambda: store.add("informed", 0) == size, LINGER)
            raise UserError(first)
        if (arrived := store.add("arrived", 0)) < size:
            raise UserError(f"only {arrived} of {size} processes started within {WAIT / 60:.0f} minutes")
        return [store.get(f"word {other}").decode() for other in range(size)]

    def connect(self, trainer: Trainer, settings: Any, own_timeout: bool) -> None:
        """Have the processes of `trainer` watch each other from their first connection on.

        `settings.collective_timeout_minutes` limits how long a collective operation waits for all processes. After
        `settings.silence_seconds` without a sign of life a process counts as lost; None waits for ever.

        Raises:
            UserError: one of these settings is not above 0.
        """
        minutes, silence = settings.collective_timeout_minutes, settings.silence_seconds
        if not minutes > 0:
            raise UserError(f"collective_timeout_minutes must be above 0, got {minutes}")
        if silence is not None and not silence > 0:
            raise UserError(f"silence_seconds must be above 0 or null, got {silence}")
        if trainer.world_size == 1:
            return
        import torch.distributed as dist

        from cait.extras.watch.watch import Watch

        strategy = trainer.strategy
        connect = strategy.setup_environment

        def connect_and_watch() -> None:
            strategy.setup_environment = connect  # type: ignore[method-assign]  # for what comes after this fit
            self.agree()
            self._starting = False
            try:
                connect()
            except dist.DistError as error:
                raise UserError(f"cannot reach the other processes: {one_line(error)}") from error
            if not own_timeout:
                limit_collectives(timedelta(minutes=minutes))
            store = dist.PrefixStore("cait/watch", dist.distributed_c10d._get_default_store().clone())
            limit = math.inf if silence is None else min(silence, 60 * minutes)
            self.watch = Watch(store, _place(trainer), limit, lambda: trainer.global_step)
            self.watch.start()
            _silence_lightnings_observer()

        strategy.setup_environment = connect_and_watch  # type: ignore[method-assign]

    def disconnect(self) -> None:
        if self.watch:
            self.watch.stop()
            self.watch = None

    def fail(self, error: Exception, line: str | None) -> str | None:
        """Print the first cause once, and nothing about the connections that broke after it."""
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
        from cait.extras.watch.watch import is_of_the_network, print_error

        if line is not None:
            status, prints = 2, watch.fail(line, 2)
        elif is_of_the_network(error):
            trouble, prints = watch.blame(error)
            line, status = trouble.text, trouble.status
        else:
            status, prints = 1, watch.fail(kind_and_place(error))
        if prints and line is not None:
            print_error(line)
        elif prints:
            traceback.print_exception(error)
        watch.leave(status)


def limit_collectives(limit: timedelta) -> None:
    """Limit how long the default group's operations wait. Connecting may take longer, as processes start apart."""
    from torch.distributed import distributed_c10d

    distributed: Any = distributed_c10d
    set_timeout = distributed.set_timeout if hasattr(distributed, "set_timeout") else distributed._set_pg_timeout
    set_timeout(limit)
    distributed._get_default_store().set_timeout(limit)


def _silence_lightnings_observer() -> None:
    """Lightning would kill this process within 5 s after one that it started fails, before it can say why."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def _place(trainer: Trainer) -> Place:
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    from cait.extras.watch.watch import Place

    launcher = trainer.strategy.launcher
    place = Place(trainer.global_rank, trainer.world_size, trainer.local_rank)
    if isinstance(launcher, _SubprocessScriptLauncher):
        place.children = launcher.procs
    return place

"""How the processes of a run come together, and how long they wait for each other."""

from __future__ import annotations

import math
import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from cait.errors import UserError, one_line
from cait.extras.watch.processes import WatchedProcesses
from cait.extras.watch.watch import Place, Watch


def watch(
    processes: WatchedProcesses, trainer: Trainer, minutes: float, silence: float | None, own_timeout: bool
) -> None:
    """Have the processes of `trainer` watch each other from their first connection on; nothing if there is only one.

    Args:
        processes: get the watch.
        trainer: a Trainer that has not started yet.
        minutes: how long a collective operation waits for all processes.
        silence: seconds without a sign of life after which a process counts as lost, unless the collectives time out
            sooner; None waits for ever.
        own_timeout: the strategy brings its own time limit.

    Raises:
        UserError: `minutes` or `silence` is not above 0.
    """
    if not minutes > 0:
        raise UserError(f"collective_timeout_minutes must be above 0, got {minutes}")
    if silence is not None and not silence > 0:
        raise UserError(f"silence_seconds must be above 0 or null, got {silence}")
    if trainer.world_size == 1:
        return
    strategy = trainer.strategy
    here = getattr(strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(here, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise UserError(f"--trainer.num_nodes {trainer.num_nodes}: start it on every machine with torchrun or srun")
    connect = strategy.setup_environment
    limit = math.inf if silence is None else min(silence, 60 * minutes)

    def connect_and_watch() -> None:
        strategy.setup_environment = connect  # type: ignore[method-assign]  # for what comes after this fit
        processes.agree()
        try:
            connect()
        except dist.DistError as error:
            raise UserError(f"cannot reach the other processes: {one_line(error)}") from error
        if not own_timeout:
            limit_collectives(timedelta(minutes=minutes))
        store = dist.PrefixStore("cait/watch", dist.distributed_c10d._get_default_store().clone())
        processes.watch = Watch(store, _place(trainer), limit, lambda: trainer.global_step)
        processes.watch.start()
        _replace_lightnings_observer()

    strategy.setup_environment = connect_and_watch  # type: ignore[method-assign]


def limit_collectives(limit: timedelta) -> None:
    """Limit how long the default group's operations wait. Connecting may take longer, as processes start apart."""
    distributed: Any = dist.distributed_c10d
    set_timeout = distributed.set_timeout if hasattr(distributed, "set_timeout") else distributed._set_pg_timeout
    set_timeout(limit)
    distributed._get_default_store().set_timeout(limit)


def _replace_lightnings_observer() -> None:
    """Lightning would kill this process within 5 s after one that it started fails, before it can say why."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def _place(trainer: Trainer) -> Place:
    launcher = trainer.strategy.launcher
    place = Place(trainer.global_rank, trainer.world_size, trainer.local_rank)
    if isinstance(launcher, _SubprocessScriptLauncher):
        place.children = launcher.procs
    return place

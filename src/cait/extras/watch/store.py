"""The store through which processes that torchrun or SLURM started agree before they train."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

WAIT = 1800.0
"""Seconds to wait for the other processes to start."""

_COMMON: dict[str, Any] = {"timeout": timedelta(seconds=WAIT), "multi_tenant": True, "wait_for_workers": False}


def open_store(cluster: ClusterEnvironment) -> Store:
    """Connect to the store that process 0 serves. `torch.distributed` will use it too."""
    from torch.distributed import TCPStore

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _replace_torchruns(cluster)
        os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return store
    return TCPStore(cluster.main_address, cluster.main_port, **_COMMON, is_master=cluster.global_rank() == 0)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
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
    torchruns = PrefixStore("cait", TCPStore(cluster.main_address, cluster.main_port, **_COMMON))
    if rank > 0:
        greeting = uuid.uuid4().hex
        torchruns.set(f"greeting {rank}", greeting)
        wait_until(lambda: greeting in torchruns.get("offer").decode(), WAIT)
        store = TCPStore(cluster.main_address, int(torchruns.get("offer").decode().split()[0]), **_COMMON)
        store.add("connected", 1)
        return store
    store = TCPStore(cluster.main_address, 0, is_master=True, **_COMMON)

    def all_connected() -> bool:
        keys = [f"greeting {other}" for other in range(1, size)]
        greetings = [torchruns.get(key).decode() for key in keys if torchruns.check([key])]
        torchruns.set("offer", " ".join([str(store.port), *greetings]))
        return store.add("connected", 0) == size - 1

    wait_until(all_connected, WAIT)
    return store

"""Processes that torchrun or SLURM started agree before they train, so that an error in one ends all."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cait.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

    from cait.extras.watch.watch import Watch

WAIT = 1800.0
"""Seconds to wait for the other processes to start."""
LINGER = 60.0
"""Seconds that process 0, which has the store, stays after an error, so that the others can read it."""

_COMMON: dict[str, Any] = {"timeout": timedelta(seconds=WAIT), "multi_tenant": True, "wait_for_workers": False}

_rounds = ["start", "claim", "folder", "fit"]
_store: Any = None

watch: Watch | None = None
"""The watch over the processes that train together, however they were started; set once they are connected."""


def cluster() -> ClusterEnvironment | None:
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


def several() -> bool:
    """Whether torchrun or SLURM started more than this one process."""
    here = cluster()
    return here is not None and here.world_size() > 1


def agree(word: str = "", trouble: str = "") -> list[str]:
    """Wait for all processes and return the word of each, by rank; [word] if this process is alone.

    All processes call it equally often. A process that cannot go on says why in `trouble`.

    Raises:
        UserError: on every process as soon as one has trouble, with the message of the first.
    """
    here = cluster()
    if here is None or here.world_size() == 1:
        return [word]
    try:
        return _agree(here, word, trouble)
    except RuntimeError as error:  # torch's errors of the network
        place = f"{here.main_address}:{here.main_port}"
        raise UserError(f"cannot reach the other processes at {place}: {str(error).splitlines()[0]}") from error


def _agree(here: ClusterEnvironment, word: str, trouble: str) -> list[str]:
    from torch.distributed import PrefixStore

    rank, size = here.global_rank(), here.world_size()
    store = PrefixStore(f"cait/{_rounds.pop(0)}", _open(here))
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
    _rounds.clear()
    store.add("told", 1)
    if rank == 0:
        _wait(lambda: store.add("told", 0) == size, LINGER)
    raise UserError(told)


def add_round(name: str) -> None:
    """Have all processes agree once more, as the next round of the start."""
    _rounds.insert(0, name)


def tell(trouble: str) -> str:
    """Tell the other processes why this one ends, unless all have begun. Returns the line to end with."""
    try:
        if _rounds and several():
            agree(trouble=trouble)
    except UserError as error:
        return str(error)
    return trouble


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _open(here: ClusterEnvironment) -> Any:
    """The store that process 0 serves and that `torch.distributed` will use too."""
    from torch.distributed import TCPStore

    global _store
    if _store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _store = _instead_of_torchruns(here)
        os.environ |= {"MASTER_PORT": str(_store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    elif _store is None:
        _store = TCPStore(here.main_address, here.main_port, **_COMMON, is_master=here.global_rank() == 0)
    return _store


def _instead_of_torchruns(here: ClusterEnvironment) -> Any:
    """A store for this start only.

    torchrun's store outlives the processes. After a restart it still holds the addresses of killed processes, and
    Gloo and NCCL would connect to them. So process 0 offers a port of its own through torchrun's store. The offer
    repeats each process's greeting, so that nobody takes an old offer for the new one.
    """
    from torch.distributed import PrefixStore, TCPStore

    rank, size = here.global_rank(), here.world_size()
    torchruns = PrefixStore("cait", TCPStore(here.main_address, here.main_port, **_COMMON))
    if rank > 0:
        greeting = uuid.uuid4().hex
        torchruns.set(f"greeting {rank}", greeting)
        _wait(lambda: greeting in torchruns.get("offer").decode(), WAIT)
        store = TCPStore(here.main_address, int(torchruns.get("offer").decode().split()[0]), **_COMMON)
        store.add("heard", 1)
        return store
    store = TCPStore(here.main_address, 0, is_master=True, **_COMMON)

    def heard_by_all() -> bool:
        keys = [f"greeting {other}" for other in range(1, size)]
        greetings = [torchruns.get(key).decode() for key in keys if torchruns.check([key])]
        torchruns.set("offer", " ".join([str(store.port), *greetings]))
        return store.add("heard", 0) == size - 1

    _wait(heard_by_all, WAIT)
    return store

"""Before they train, the processes of a run meet in a store: each gives a word, or says why it ends instead."""

from __future__ import annotations

import json
import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from cait.errors import tell

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT = timedelta(minutes=30)
"""How long a process waits for the others before they train; Lightning's limit for what comes later is the same."""
LAST_WAIT = timedelta(minutes=1)
"""How long one that ends waits for the others: they may still be importing PyTorch."""
PATIENCE = timedelta(seconds=10)
"""After how long a process says for which other it waits."""


class Message(NamedTuple):
    """What a process says at a meeting."""

    word: str
    error: str
    """Why it ends; empty if it goes on."""
    host: str
    screen: str
    """The same for processes whose output is read together: torchrun has a terminal a machine, SLURM one file a job."""


def connect(address: str, port: int, serves: bool, wait: timedelta) -> Store:
    """Open the store that process 0, or torchrun, serves. Raises RuntimeError if it cannot be reached in time."""
    from torch.distributed import TCPStore

    line = f"{socket.gethostname()} waits for process 0 at {address}:{port}"
    clock = threading.Timer(PATIENCE.total_seconds(), tell, [line])
    clock.daemon = True
    clock.start()
    try:
        # who else is late is told at the meeting
        return TCPStore(
            address, port, None, serves, wait, wait_for_workers=False, multi_tenant=True
        )
    finally:
        clock.cancel()


def meet(
    store: Store, rank: int, size: int, word: str, error: str, wait: timedelta
) -> list[Message]:
    """The messages of all processes, by rank.

    Raises RuntimeError if one has not come in time, or the store has gone.
    """
    message = Message(word, error, socket.gethostname(), os.environ.get("GROUP_RANK", ""))
    number = store.add(f"cait/agreements of {rank}", 1)
    key = f"cait/agreement {number}"
    store.set(f"{key}/{rank}", json.dumps(message))
    keys = [f"{key}/{other}" for other in range(size)]
    for other in range(size):
        _wait(store, keys[other], f"process {other} of 0 to {size - 1}", wait)
    texts = store.multi_get(keys)
    readers = store.add(f"{key}/read", 1)
    if readers == size:
        store.set(f"{key}/all have read", "")
    if rank == 0:  # it serves the store, so it may not end before
        store.wait([f"{key}/all have read"])
    return [Message(*json.loads(text)) for text in texts]


def _wait(store: Store, key: str, whom: str, wait: timedelta) -> None:
    try:
        store.wait([key], PATIENCE)
    except RuntimeError:
        tell(f"{socket.gethostname()} waits for {whom}")
        store.wait([key], wait)


def last_line(messages: list[Message]) -> str:
    """Why the processes end, with the first whose reason it is unless all have the same; empty if all go on."""
    errors = {sent.error for sent in messages}
    if len(errors) == 1:
        return errors.pop()
    rank = next(rank for rank, sent in enumerate(messages) if sent.error)
    return f"process {rank} on {messages[rank].host}: {messages[rank].error}"


def speaks(messages: list[Message], rank: int) -> bool:
    """Whether this process is the first whose output is read together, so that it prints the line."""
    screens = [sent.screen for sent in messages]
    return screens.index(screens[rank]) == rank

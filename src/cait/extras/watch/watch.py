"""Signs of life of processes that train together: one that falls silent is named, and all end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

SECONDS = 1.0
"""Time between two signs of life."""
PATIENCE = 10.0
"""Seconds to look on after a connection broke: a process that lives gives a sign meanwhile."""
LINGER = 3.0
"""Seconds that the others have to read why, before process 0 ends and takes the store with it."""
ADVICE = "it was killed or stopped, or its machine was lost; look at its output and at `dmesg` there"


class Trouble(NamedTuple):
    """Why all processes end, the machine that has printed it, and the status that they exit with."""

    text: str
    host: str
    status: int


class Place(NamedTuple):
    """Where a process stands among the others, on all machines and on its own."""

    rank: int
    size: int
    local_rank: int
    children: Sequence[subprocess.Popen[Any]] = ()
    """The processes that Lightning in this one started, in the order of their ranks, which begin with 1."""


class Watch:
    """Signs of life and the first trouble, in a store that all processes can reach.

    One thread uses the store. That blocks for ever if process 0, which serves the store, is stopped, so another
    thread judges. It also ends a process whose main thread is blocked in a collective. It counts seconds only while
    it runs, so a process that was itself held up does not blame the others.

    Args:
        store: a connection that nobody else uses.
        place: of this process.
        limit: seconds of silence after which a process counts as lost.
    """

    def __init__(self, store: Any, place: Place, limit: float) -> None:
        self.store, self.place, self.limit = store, place, limit
        self.host = socket.gethostname()
        self._now = self._heard = 0.0
        """The time that `_judge` has counted, and when the store answered last."""
        self._beats, self._since = dict.fromkeys(range(place.size), ""), dict.fromkeys(range(place.size), 0.0)
        """The last sign of life of each process, and when it came; process 0 knows."""
        self._told: Trouble | None = None
        """Why another process ends all."""
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Call it on all processes."""
        if self.place.rank == 0:
            self.store.set("process 0", f"{os.getpid()} {self.host}")
        self._process_0 = self.store.get("process 0").decode()
        self.store.set(f"beat {self.place.rank}", f"0 {self.host}")  # its machine is known if it falls silent at once
        self._beating.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def stop(self) -> None:
        """Tell the other processes that this one has finished: from now on its silence is no trouble."""
        self._over.set()
        self._beating.join(LINGER)
        end = time.monotonic() + LINGER
        if self.place.rank == 0:  # it takes the store with it, so it waits until the others have finished
            with contextlib.suppress(RuntimeError):
                while set(self._read().values()) != {"done"} and time.monotonic() < end:
                    time.sleep(SECONDS / 10)

    def is_first(self) -> bool:
        """Whether no other process has failed before this one, which prints why and then calls `tell`."""
        try:
            return self.store.compare_set("first", "", str(self.place.rank)) == str(self.place.rank).encode()
        except RuntimeError:  # process 0 has ended
            return True

    def tell(self, text: str, status: int) -> None:
        """End the other processes too. It must have been printed: Lightning's process 0 kills those that it started."""
        with contextlib.suppress(RuntimeError):
            self.store.set("trouble", json.dumps(Trouble(text, self.host, status)))

    def leave(self, status: int) -> NoReturn:
        """End this process, whatever its threads wait for, and those on this machine that are stopped."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the terminal or the reader has gone
                stream.flush()
        if self.place.rank == 0 and len(self.place.children) < self.place.size - 1:
            time.sleep(LINGER)
        for child in self.place.children:
            child.kill()
        if self._now - self._heard > self.limit and self._process_0 == f"{os.getppid()} {self.host}":
            os.kill(os.getppid(), signal.SIGKILL)  # process 0 started this one
        os._exit(status)

    def _beat(self) -> None:
        rank, count = self.place.rank, 0
        with contextlib.suppress(RuntimeError):  # process 0 has ended: `_judge` finds it silent
            while not self._over.wait(SECONDS):
                count += 1
                self.store.set(f"beat {rank}", f"{count} {self.host}")
                for other, beat in (self._read() if rank == 0 else {}).items():
                    if beat != self._beats[other] or beat == "done":
                        self._beats[other], self._since[other] = beat, self._now
                if rank > 0 and self.store.check(["beat 0"]) and self.store.get("beat 0") == b"done":
                    self._over.set()  # process 0 leaves and takes the store with it
                elif self.store.check(["trouble"]):
                    self._told = Trouble(*json.loads(self.store.get("trouble")))
                self._heard = self._now
            self.store.set(f"beat {rank}", "done")

    def _read(self) -> dict[int, str]:
        """The last sign of life of each process that has given one."""
        keys = {rank: f"beat {rank}" for rank in range(self.place.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def _judge(self) -> None:
        rank, local_rank = self.place.rank, self.place.local_rank
        while not self._over.wait(SECONDS):
            self._now += SECONDS
            if self._told:
                if self._told.host != self.host and local_rank == 0:
                    print_error(self._told.text)
                self.leave(self._told.status)
            if text := self._dead_child() or self.silent(self.limit):
                if rank <= 1 or local_rank == 0:  # process 0 names the others; all others name process 0
                    print_error(text)
                if rank == 0:
                    self.tell(text, 1)
                self.leave(1)

    def _dead_child(self) -> str:
        for rank, child in enumerate(self.place.children, start=1):
            # A process that has finished may end before this one, with status 143 after a signal.
            if (status := child.poll()) and self._read().get(rank) != "done" and not self.store.check(["first"]):
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
                return f"process {rank} on {self.host} {how}"
        return ""

    def silent(self, limit: float) -> str:
        """Name the processes silent for longer: process 0 judges the others, and they judge process 0."""
        heard = self._since | {0: self._now} if self.place.rank == 0 else {0: self._heard}
        silent = [rank for rank, since in heard.items() if self._now - since > limit]
        if not silent:
            return ""
        hosts = {rank: beat.split()[1:] for rank, beat in self._beats.items()} | {0: self._process_0.split()[1:]}
        names = ", ".join(" on ".join([f"process {rank}", *hosts[rank]]) for rank in silent[:8])
        return f"{names}: no answer for {self._now - heard[silent[0]]:.0f} s; {ADVICE}"


def print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(f"cait: error: {text}", file=sys.stderr, flush=True)


def is_of_the_network(error: Exception) -> bool:
    """Whether an error may be the consequence of another process's end. NCCL's have more to say, and stay whole."""
    from torch.distributed import DistNetworkError, DistStoreError

    return isinstance(error, DistNetworkError | DistStoreError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )

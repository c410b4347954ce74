"""Processes that train together watch each other: if one fails or falls silent, all end, and one says why."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

SECONDS = 1.0
"""Time between two signs of life."""
PATIENCE = 10.0
"""Seconds within which the cause of a broken connection should turn up."""
LINGER = 3.0
"""Seconds that the others have to read why, before process 0 ends and takes the store with it."""
ADVICE = "it was killed or stopped, or its machine was lost; look at its output and at `dmesg` there"


class Trouble(NamedTuple):
    """Why all processes end, which one found it, and the status that they exit with."""

    text: str
    rank: int
    host: str
    status: int = 1


class Place(NamedTuple):
    """Where a process stands among the others, on all machines and on its own."""

    rank: int
    size: int
    local_rank: int
    children: Sequence[subprocess.Popen[Any]] = ()
    """The processes that this one started, in the order of their ranks, which begin with 1."""


class Watch:
    """Signs of life and the first trouble, in a store that all processes can reach.

    One thread uses the store. That blocks for ever if process 0, which serves the store, is stopped, so another
    thread judges. It also ends a process whose main thread is blocked in a collective. It counts seconds only while
    it runs, so a process that was itself held up does not blame the others.

    Args:
        store: a connection that nobody else uses.
        place: of this process.
        limit: seconds of silence after which a process counts as lost.
        step: returns the optimizer steps done.
    """

    def __init__(self, store: Any, place: Place, limit: float, step: Callable[[], int] = lambda: 0) -> None:
        self.store, self.place, self.limit, self.step = store, place, limit, step
        self.host = socket.gethostname()
        self.trouble: Trouble | None = None
        self._now = self._heard = 0.0
        """The time that `_judge` has counted, and when the store answered last."""
        self._beats, self._since = dict.fromkeys(range(place.size), ""), dict.fromkeys(range(place.size), 0.0)
        """The last sign of life of each process, and when it came; process 0 knows."""
        self._over, self._ending = threading.Event(), threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Call it on all processes."""
        if self.place.rank == 0:
            self.store.set("process 0", f"{os.getpid()} {self.host}")
        self._process_0 = self.store.get("process 0").decode()
        self._beating.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def stop(self) -> None:
        """Tell the other processes that this one has finished: from now on its silence is no trouble."""
        self._over.set()
        self._beating.join(PATIENCE)
        if self.place.rank == 0:  # it takes the store with it, so it waits until the others have finished too
            _within(3 * SECONDS, self._all_done)

    def _all_done(self) -> None:
        while set(self._read().values()) != {"done"}:
            time.sleep(SECONDS / 10)

    def fail(self, text: str, status: int = 1) -> bool:
        """Tell the other processes that this one ends, and why. False if another has failed before and prints why."""
        self._ending.set()
        return self._report(text, status)

    def blame(self, error: Exception) -> tuple[Trouble, bool]:
        """Find the process that broke the connection, and tell the others. Also whether this process prints it."""
        self._ending.set()
        before = _within(PATIENCE, self._read)
        end, found = time.monotonic() + PATIENCE, ""
        while self.trouble is None and not found and time.monotonic() < end:
            time.sleep(SECONDS / 10)
            found = self._dead_child()
        prints = self._prints() if self.trouble else self._report(found or self._suspect(before or {}, error))
        assert self.trouble is not None
        return self.trouble, prints

    def leave(self, status: int) -> NoReturn:
        """End this process, whatever its threads wait for. Process 0 stays until the others know why."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the terminal or the reader has gone
                stream.flush()
        _within(LINGER, self._linger)
        for worker in multiprocessing.active_children():
            worker.kill()
        for child in self.place.children:
            child.kill()
        if self._is_child() and self._now - self._heard > self.limit:
            os.kill(os.getppid(), signal.SIGKILL)  # process 0 is stopped, and would stay so
        os._exit(status)

    def _linger(self) -> None:
        self.store.add("informed", 1)
        # Lightning kills process 0 as soon as a process that it started fails, so these leave after it.
        while self.store.add("informed", 0) < self.place.size if self.place.rank == 0 else self._is_child():
            time.sleep(SECONDS / 10)

    def _is_child(self) -> bool:
        """Whether process 0 started this one."""
        return self._process_0 == f"{os.getppid()} {self.host}"

    def _beat(self) -> None:
        rank, count = self.place.rank, 0
        with contextlib.suppress(RuntimeError):  # process 0 has ended, which the next collective notices
            while not self._over.wait(SECONDS):
                count += 1
                self.store.set(f"beat {rank}", f"{count} {self.step()} {self.host}")
                for other, beat in (self._read() if rank == 0 else {}).items():
                    if beat != self._beats[other] or beat == "done":
                        self._beats[other], self._since[other] = beat, self._now
                if rank > 0 and self.store.check(["beat 0"]) and self.store.get("beat 0") == b"done":
                    self._over.set()  # process 0 leaves and takes the store with it
                elif self.store.check(["trouble"]):
                    self.trouble = Trouble(*json.loads(self.store.get("trouble")))
                self._heard = self._now
            self.store.set(f"beat {rank}", "done")

    def _read(self) -> dict[int, str]:
        """The last sign of life of each process that has given one."""
        keys = {rank: f"beat {rank}" for rank in range(self.place.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def _judge(self) -> None:
        while not self._over.wait(SECONDS):
            self._now += SECONDS
            if self._ending.is_set():  # the main thread ends this process
                continue
            text = self._dead_child() or self._silent(self.limit)
            prints = self._prints() if self.trouble else bool(text) and self._report(text)
            if self.trouble and not self._ending.is_set():
                if prints:
                    print_error(self.trouble.text)
                self.leave(self.trouble.status)

    def _silent(self, limit: float) -> str:
        """Name the processes silent for longer than `limit`: process 0 judges the others, and they judge process 0."""
        heard = self._since | {0: self._now} if self.place.rank == 0 else {0: self._heard}
        silent = [rank for rank, since in heard.items() if self._now - since > limit]
        if not silent:
            return ""
        return f"{self._names(silent, self._beats)}: no answer for {self._now - heard[silent[0]]:.0f} s; {ADVICE}"

    def _dead_child(self) -> str:
        for rank, child in enumerate(self.place.children, start=1):
            # A process that has finished may end before this one, with status 143 after a signal.
            if (status := child.poll()) and _within(PATIENCE, partial(self.store.get, f"beat {rank}")) != b"done":
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
                return f"process {rank} on {self.host} {how}"
        return ""

    def _suspect(self, before: dict[int, str], error: Exception) -> str:
        """The processes that may have broken the connection: silent since `before` was read, or behind the others."""
        now = _within(PATIENCE, self._read)
        if now is None:
            return f"process 0 has ended or does not answer; {ADVICE}"
        # One that stopped in its first second has given no sign, before and now.
        lost = [rank for rank in range(self.place.size) if now.get(rank) == before.get(rank) != "done"]
        if lost:
            return f"{self._names(lost, now)}: no answer; {ADVICE}"
        steps = {rank: int(beat.split()[1]) for rank, beat in now.items() if beat != "done"}
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        what = (str(error).splitlines() or [type(error).__name__])[0]
        if behind:
            return f"{self._names(behind, now)}: still at step {steps[behind[0]]}, and the others wait: {what}"
        return f"the connection between the processes broke: {what}"

    def _names(self, ranks: list[int], beats: dict[int, str]) -> str:
        hosts = {rank: beats.get(rank, "").split()[2:] for rank in ranks} | {0: self._process_0.split()[1:]}
        return ", ".join(" on ".join([f"process {rank}", *hosts[rank]]) for rank in ranks[:8])

    def _report(self, text: str, status: int = 1) -> bool:
        """Make this the trouble of all processes, unless there is one already. Whether this process prints it."""
        found = Trouble(text, self.place.rank, self.host, status)
        first = _within(PATIENCE, lambda: self.store.compare_set("trouble", "", json.dumps(found)))
        self.trouble = Trouble(*json.loads(first)) if first else found
        # Without the store no process knows which was first, so one process on each machine prints it.
        return self._prints() if first or status == 2 else self.place.rank <= 1 or self.place.local_rank == 0

    def _prints(self) -> bool:
        """Whether this process prints the trouble: the one that found it does, and one on every other machine."""
        assert self.trouble is not None
        return self.trouble.rank == self.place.rank or (self.trouble.host != self.host and self.place.local_rank == 0)


def print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(f"cait: error: {text}", file=sys.stderr, flush=True)


def is_of_the_network(error: Exception) -> bool:
    """Whether an error may be the consequence of another process's end."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns; None if it fails or takes longer."""
    result: list[Any] = [None]

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]

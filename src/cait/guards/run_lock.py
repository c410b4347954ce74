"""One process at a time trains in a run's folder, and all processes of a run must see the same folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from filelock import Timeout
from lightning.pytorch import Callback, LightningModule, Trainer

from cait import disk, signature
from cait.errors import UserError
from cait.file_lock import Lock
from cait.run.rundir import FINISHED, LOCK, OWNER

SECONDS = 10.0
"""Time that a network file system may need to show a change to another node."""

PATIENCE = 2.0
"""Seconds to wait for the lock: a process that was just killed, or a child it just forked, lets go a moment later."""


class RunLock(Callback):
    """A lock on a run's folder, until `release` or the end of the process, however it ends. A missing folder is made.

    As a callback of the Trainer it learns when training begins: from then on `roll_back` removes nothing. The file
    FINISHED says that training has ended as planned; a run that goes on loses it.

    Raises:
        UserError: another process holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        disk.check_inside(run_dir)
        self._lock = Lock(run_dir / LOCK)
        try:
            self._lock.acquire_from_the_dead(PATIENCE)
        except Timeout as error:
            lease = self._lock.lease
            advice = f", which renews {lease}; if it is gone, delete that file" if lease else ""
            by = signature.own_text(run_dir / OWNER) or "another process"  # anybody could write there what is not so
            raise UserError(f"{run_dir} is being trained by {by}{advice}") from error
        self._trained, self._before = False, {path.name for path in run_dir.iterdir()}  # `roll_back` keeps them
        self.owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        (run_dir / OWNER).write_text(self.owner)
        signature.sign(run_dir / OWNER, self.owner)
        disk.clear_scratch(run_dir)

    def release(self) -> None:
        self._lock.release()

    def on_train_start(self, *_: Any) -> None:
        self._trained = True
        (self.run_dir / FINISHED).unlink(missing_ok=True)

    def on_train_batch_start(self, *_: Any) -> None:
        if self._lock.is_lost:  # a file system without locks, and this process stood still for a minute
            raise UserError(f"{self.run_dir} was taken over by {_owner(self.run_dir)}, while this process was held up")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # Lightning does not call this after an exception or a signal
            (self.run_dir / FINISHED).touch()

    def roll_back(self) -> None:
        """Release the folder. If training never began, remove what is new in it, and the folder if it is empty."""
        if self._trained:
            self.release()
            return
        for path in self.run_dir.iterdir():
            if path.name not in self._before | {LOCK}:
                disk.remove(path)
        self.release()
        ours = {LOCK, OWNER, signature.SIGNATURE}
        if {path.name for path in self.run_dir.iterdir()} <= ours:
            for name in ours:
                (self.run_dir / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process has just taken it
                self.run_dir.rmdir()


def _owner(run_dir: Path) -> str:
    """Who holds the folder, or held it last, as the file there says; empty if unknown."""
    try:
        return disk.read_text(run_dir / OWNER)
    except (OSError, UserError):
        return ""


def shared(run_dir: Path, holder: str) -> bool:
    """Whether `holder` holds this very folder. Other processes ask this, perhaps on other nodes."""
    end = time.monotonic() + SECONDS
    while _owner(run_dir) != holder:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
        if run_dir.parent.is_dir():
            os.listdir(run_dir.parent)  # makes NFS look again
    return True

"""One process at a time trains in a run's folder."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from filelock import Timeout
from lightning.pytorch import Callback, LightningModule, Trainer

from cait import disk
from cait.errors import UserError
from cait.run.rundir import FINISHED, LOCK, FolderGuard

STARTING = ".starting"
PATIENCE = 2.0
"""Seconds to wait for the lock: a process that was just killed, or a child it just forked, lets go a moment later."""


class RunLock(Callback):
    """A lock on a run's folder, until `release` or the end of the process, however it ends. A missing folder is made.

    As a callback of the Trainer it learns when training begins. The file STARTING says that it has not, to whatever
    process asks. FINISHED says that it has ended as planned; a run that goes on loses it.

    Raises UserError if another process holds the lock.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        disk.check_inside(run_dir)
        self.guard = FolderGuard(run_dir)
        try:
            self.release = disk.acquire_lock(run_dir / LOCK, PATIENCE).release
        except Timeout as error:
            raise UserError(f"{run_dir} is being trained by another process") from error
        self._before = {path.name for path in run_dir.iterdir()} - {LOCK, STARTING}
        # a text of this start, by which other machines know that the folder is the same
        (run_dir / STARTING).write_text(f"{os.getpid()} {time.time_ns()}")
        disk.clear_scratch(run_dir)

    def on_train_start(self, *_: Any) -> None:
        self.guard.check()
        for name in (STARTING, FINISHED):
            (self.run_dir / name).unlink(missing_ok=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # Lightning does not call this after an exception or a signal
            self.guard.check()
            (self.run_dir / FINISHED).touch()

    def roll_back(self) -> None:
        """Release the folder. If training never began, first remove what is new in it, and itself if that was all."""
        if not self.guard.is_gone() and (self.run_dir / STARTING).exists():
            for path in self.run_dir.iterdir():
                if path.name not in self._before | {LOCK}:
                    disk.remove(path)
            if not self._before:
                (self.run_dir / LOCK).unlink(missing_ok=True)
                # another process has just taken it, or it is a link
                with contextlib.suppress(OSError):
                    self.run_dir.rmdir()
        self.release()

"""Callbacks that give a run the time, or the fault, that a test needs."""

import os
import signal
import time
from pathlib import Path

from lightning.pytorch import Callback


class Pace(Callback):
    """Wait `PACE` seconds in each step, a variable of the job's, until there is a file `hurry`.

    A run left alone does not wait, and has the same numbers.
    """

    def on_train_batch_start(self, *_):
        if not Path("hurry").exists():
            time.sleep(float(os.environ.get("PACE", "0")))


class Dies(Callback):
    """The second process is killed whenever it begins to train, as by a machine without enough memory."""

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

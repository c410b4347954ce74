"""The callback of a rehearsal: it times a run of `fit`, saves at some steps, and sends itself a signal."""

import itertools
import json
import math
import os
import platform
import signal
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from cait import disk
from cait.errors import UserError
from cait.loops import batches_a_step, batches_an_epoch, total_steps
from cait.run.checkpoints import LastCheckpoint
from cait.run.rundir import LAST

TASK = "CAIT_REHEARSAL"
"""Variable with what the callback does, as JSON: `Rehearsal` in verb.py makes it."""
LEAST = 20
"""Steps of a run that can be rehearsed."""
MOST = 1 << 24
"""Gradients that are added up to time that: there may be no memory for all of them once more."""
GB = 1e9
FEWEST = 4
"""Batches that are timed, however long they take."""
Times = list[tuple[float, float]]
"""Of each batch the seconds until the next one is fetched, and those of them that training waited for it."""


def now() -> float:
    """The time when the device has done all that it was asked to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class Batches:
    """A loader of training, timed."""

    drains = False
    """Whether to leave out what the loader has ready, which hides for a while that it is slow."""
    repeats = False
    """Whether to give the last batch again and again."""
    is_timed = True

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.times: Times = []

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            waited = time.perf_counter() - start
            yield batch
            if self.is_timed:
                self.times.append((time.perf_counter() - start, waited))
            self.is_timed = True
            if self.drains:
                self.drains = False
                ready = self.loader.num_workers * (self.loader.prefetch_factor or 0)
                count = sum(1 for _ in itertools.islice(batches, ready))
                # the epoch keeps its length
                batches = itertools.chain(batches, itertools.repeat(batch, count))
            if self.repeats:
                batches = itertools.repeat(batch)


class Rehearse(Callback):
    """Do the task of the environment: at some steps, when all of a step is done, the methods that it names."""

    def __init__(self) -> None:
        self.task = json.loads(os.environ[TASK])
        self.report: Any = {"bits": {}}
        self.stretches: list[Times] = []
        """Of training with the loader, and then without it."""
        self.limit = math.inf
        """Seconds of the stretch that is timed."""
        self.validated: list[float] = []
        """When the first validation began, and ended each batch."""

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        make_loader = trainer.datamodule.train_dataloader

        def timed() -> Batches:
            self.batches = Batches(make_loader())
            return self.batches

        trainer.datamodule.train_dataloader = timed

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if not LEAST <= total_steps(trainer) < math.inf or batches_an_epoch(trainer) < 2:
            raise UserError(
                f"a rehearsal needs a run of {LEAST} steps or more with an end, and epochs of two batches: "
                "set --trainer.max_epochs or max_steps, or lower --data.batch_size"
            )

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            self.validated = [now()]
        else:
            self.batches.is_timed = False

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            self.validated.append(now())

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for action in self.task["actions"].pop(str(trainer.global_step), ()):
            getattr(self, action)(trainer)

    def save(self, trainer: Any) -> None:
        saver = LastCheckpoint.among(trainer)[0]
        start = now()
        saver.save(trainer)
        self.report["save_seconds"] = now() - start
        if trainer.is_global_zero:
            path = saver.folder / LAST
            self.report["save_bytes"] = path.stat().st_size
            self.report["bits"][trainer.global_step] = bits(path)

    def measure(self, trainer: Any) -> None:
        self.report["add_seconds"] = seconds_to_add(trainer)
        self.batches.drains = True
        self.time(self.task["seconds"])

    def time(self, limit: float) -> None:
        self.limit = limit
        self.batches.times = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        times = self.batches.times[1:]  # before the first one something else was done
        if len(times) < FEWEST or sum(seconds for seconds, _ in times) < self.limit:
            return
        self.stretches.append(times)
        if self.batches.repeats:
            self.time(math.inf)
            self.stop(trainer)
        else:
            self.batches.repeats = True
            self.time(self.limit / 3)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """A short run ends while it is timed."""
        self.write(trainer)

    def stop(self, trainer: Any, number: int = signal.SIGTERM) -> None:
        """As a scheduler does."""
        self.write(trainer)
        os.kill(os.getpid(), number)

    def kill(self, trainer: Any) -> None:
        self.stop(trainer, signal.SIGKILL)

    def write(self, trainer: Any) -> None:
        """Write the report; that of the first process stands for all."""
        if not trainer.is_global_zero:
            return
        stretches = [*self.stretches, self.batches.times[1:]]
        means = [np.mean(times, axis=0).tolist() for times in stretches if times]
        self.report |= facts(trainer) | dict(
            step_seconds=[seconds * batches_a_step(trainer) for seconds, _ in means],
            waiting_shares=[waited / seconds for seconds, waited in means],
            validation_seconds=validation_seconds(self.validated, sum(trainer.num_val_batches)),
            reported=time.time(),
        )
        disk.write_json(Path(self.task["folder"], f"{self.task['phase']}.json"), self.report)


def bits(path: Path) -> int:
    """Stands for all bits of the tensors in a checkpoint: torch stores a CRC-32 of each."""
    with zipfile.ZipFile(path) as archive:
        sums = [entry.CRC for entry in archive.infolist() if "/data/" in entry.filename]
    return zlib.crc32(str(sorted(sums)).encode())


def validation_seconds(times: list[float], batches: int) -> float:
    """Seconds of a validation of so many batches, from the times at its start and after each of its first ones."""
    if not times:
        return 0.0
    start, first, *_ = times
    following = (times[-1] - first) / max(1, len(times) - 2)
    return first - start + following * (batches - 1)


def seconds_to_add(trainer: Any) -> float:
    """Seconds to add up the gradients of all processes."""
    if trainer.world_size == 1:
        return 0.0
    module = trainer.lightning_module
    gradients = count(module)
    values = torch.zeros(min(gradients, MOST), device=module.device)
    dist.all_reduce(values)  # connects them
    start = now()
    dist.all_reduce(values)
    return (now() - start) * gradients / len(values)


def count(module: Any) -> int:
    """Parameters that are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def facts(trainer: Any) -> Any:
    """What the run is, how often it does what, and the memory of the first process's GPU."""
    module = trainer.lightning_module
    batches = batches_an_epoch(trainer)
    facts = dict(
        torch=torch.__version__,
        device=platform.machine(),
        network=module.name,
        parameters=count(module),
        precision=trainer.precision,
        processes=trainer.world_size,
        backend=dist.get_backend() if trainer.world_size > 1 else None,
        workers=trainer.train_dataloader.num_workers,
        images_a_step=trainer.datamodule.batch_size * trainer.world_size * batches_a_step(trainer),
        steps=total_steps(trainer),
        steps_an_epoch=math.ceil(batches / batches_a_step(trainer)),
        validations_an_epoch=batches
        / trainer.val_check_batch
        / (trainer.check_val_every_n_epoch or 1),
        save_every_n_steps=LastCheckpoint.among(trainer)[0].every_n_steps,
        gpu=None,
    )
    if module.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_reserved()
        facts["device"] = torch.cuda.get_device_name()
        facts["gpu"] = [peak / GB, (free + torch.cuda.memory_reserved() - peak) / GB]
    return facts

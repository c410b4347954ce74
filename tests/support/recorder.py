"""What a training run really saw, written down step by step; given to runs as a callback."""

import hashlib
import json
from pathlib import Path

from lightning.pytorch.callbacks import Callback


class Recorder(Callback):
    """One JSON line a batch and process in `<folder>/<rank>.jsonl`: step, digest of each picture, loss.

    Of validation, the digests of each batch in `<folder>/val-<rank>.jsonl`.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, net, outputs, batch, i):
        images, targets = batch
        line = dict(
            step=trainer.global_step,
            batch=i,
            seen=digests(images),
            targets=targets.tolist(),
            loss=float(outputs["loss"]),
        )
        self._write(f"{trainer.global_rank}.jsonl", line)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, i):
        if not trainer.sanity_checking:
            self._write(f"val-{trainer.global_rank}.jsonl", digests(batch[0]))

    def _write(self, name, line):
        self.folder.mkdir(exist_ok=True)
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines_of(folder, rank=0):
    """What a process has written of each step."""
    lines = (folder / f"{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def digests(images):
    return [hashlib.sha1(image.numpy().tobytes()).hexdigest()[:10] for image in images]


class LeavesOnce(Callback):
    """Ends the run before the step of this number without saving anything, as a kill does; never a second time."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            was_there = Path("left").exists()
            trainer.strategy.barrier()  # until all processes have looked
            Path("left").touch()
            if not was_there:
                raise SystemExit(137)


class FailsTwice(Callback):
    """An error in the answer to an error, as a full disk gives."""

    def on_train_batch_end(self, *_):
        raise OSError(28, "No space left on device")

    def on_exception(self, *_):
        raise OSError(28, "No space left on device")

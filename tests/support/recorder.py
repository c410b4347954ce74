"""What a training run really saw, written down step by step; given to runs as a callback."""

import hashlib
import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cait.errors import UserError


class Recorder(Callback):
    """One JSON line a batch and process in `<folder>/<rank>.jsonl`: step, digest of each picture, loss.

    Of validation, the digests of each batch in `<folder>/val-<rank>.jsonl`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        images, targets = batch
        line = dict(
            step=trainer.global_step,
            batch=i,
            seen=digests(images),
            targets=targets.tolist(),
            loss=float(outputs["loss"]),
        )
        self._write(f"{trainer.global_rank}.jsonl", line)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if not trainer.sanity_checking:
            self._write(f"val-{trainer.global_rank}.jsonl", digests(batch[0]))

    def _write(self, name: str, line: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def digests(images: Tensor) -> list[str]:
    return [hashlib.sha1(image.numpy().tobytes()).hexdigest()[:10] for image in images]


class LeavesOnce(Callback):
    """Ends the run before the step of this number without saving anything, as a kill does; never a second time."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, i: int
    ) -> None:
        if trainer.global_step == self.step and not (done := Path("left")).exists():
            done.touch()
            raise SystemExit(137)


class Misfortune(Callback):
    """What happens to a run before the step of this number, once."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, i: int
    ) -> None:
        of_one = self.what == "an error in one process"
        if (
            trainer.global_step != self.step
            or (of_one and trainer.global_rank != 1)
            or Path("happened").exists()
        ):
            return
        Path("happened").touch()
        if self.what == "a loader process is killed":
            # an earlier run of this process may have left some
            for child in multiprocessing.active_children():
                child.kill()
        elif of_one:
            raise UserError("as of an image that only this process meets")
        elif self.what == "the images are gone":
            Path("data/digits").rename("data/gone")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if (
            self.what == "the disk is full"
            and Path(trainer.default_root_dir, "checkpoints/best.ckpt").exists()
        ):
            # a checkpoint has 900,000 bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


class StepRecorder(Callback):
    """All that a batch's gradients follow from, in `<folder>/<rank>-<batch>.pt`, and the weights after the step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.mkdir(exist_ok=True)

        def before(network: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if network.training:
                self.record = dict(
                    images=arguments[0].clone(),
                    weights={name: tensor.clone() for name, tensor in network.state_dict().items()},
                    generator=torch.get_rng_state(),
                )

        pl_module.model.register_forward_pre_hook(before)
        self.batch = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *others: Any
    ) -> None:
        after = pl_module.model.state_dict()
        torch.save(
            self.record | dict(targets=others[1][1], step=trainer.global_step, after=after),
            self.folder / f"{trainer.global_rank}-{self.batch}.pt",
        )
        self.batch += 1


class FailsTwice(Callback):
    """An error in the answer to an error, as a full disk gives."""

    def on_train_batch_end(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def on_exception(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


class LosesFolder(Callback):
    """Somebody moves the run's folder away in this hook, or also starts another run in its place."""

    def __init__(self, hook: str, how: str) -> None:
        self.how = how
        setattr(self, hook, self.lose)

    def lose(self, trainer: Trainer, *_: object, **__: object) -> None:
        folder = Path(trainer.default_root_dir)
        moved = folder.with_name(f"moved-{folder.name}")
        if moved.exists():
            return
        folder.rename(moved)
        if self.how == "replaced":
            (folder / "checkpoints").mkdir(parents=True)
            (folder / "checkpoints/last.ckpt").write_text("of another run")
            (folder / "metrics.csv").write_text("of another run")
            (folder / ".finished").touch()

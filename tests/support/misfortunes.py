"""What happens to a run before the step of a number, once; given to runs as callbacks."""

import contextlib
import multiprocessing
import os
import resource
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from cait.errors import UserError


class Misfortune(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step and not Path("happened").exists():
            self.happen(trainer)

    def happen(self, trainer):
        Path("happened").touch()


class LoaderIsKilled(Misfortune):
    def happen(self, trainer):
        super().happen(trainer)
        for child in multiprocessing.active_children():
            child.kill()


class ImagesAreGone(Misfortune):
    def happen(self, trainer):
        super().happen(trainer)
        Path("data/digits").rename("data/gone")


class ErrorInOneProcess(Misfortune):
    def happen(self, trainer):
        if trainer.global_rank == 1:
            raise UserError("as of an image that only this process meets")


class DiskIsFull(Misfortune):
    """Once best.ckpt is written: a checkpoint has 900,000 bytes."""

    def happen(self, trainer):
        pass

    def on_save_checkpoint(self, trainer, *_):
        best = Path(trainer.default_root_dir, "checkpoints/best.ckpt")
        if best.exists() and not Path("happened").exists():
            Path("happened").touch()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


class DiskIsFilled(Misfortune):
    def happen(self, trainer):
        super().happen(trainer)
        with contextlib.suppress(OSError), open("logs/ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


class GroupIsSignalled(Misfortune):
    """All processes of the run are, by the first."""

    def __init__(self, step: int, signum: int):
        super().__init__(step)
        self.signum = signum

    def happen(self, trainer):
        if trainer.is_global_zero:
            super().happen(trainer)
            os.killpg(0, self.signum)


class LosesFolder(Callback):
    """Somebody moves the run's folder away in this hook, or also starts another run in its place."""

    def __init__(self, hook: str, is_replaced: bool):
        self.is_replaced = is_replaced
        setattr(self, hook, self.lose)

    def lose(self, trainer, *_, **__):
        folder = Path(trainer.default_root_dir)
        moved = folder.with_name(f"moved-{folder.name}")
        if moved.exists():
            return
        folder.rename(moved)
        if self.is_replaced:
            (folder / "checkpoints").mkdir(parents=True)
            for name in ("checkpoints/last.ckpt", "metrics.csv", ".finished"):
                (folder / name).write_text("of another run")

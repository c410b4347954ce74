"""Checkpoints that survive a kill, a full disk and a torn file. A signal to stop saves one too."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from cait import ckpt, disk, loops
from cait.errors import UserError
from cait.run.rundir import BEST, LAST, PREVIOUS, checkpoints
from cait.run.signals import StopSignals
from cait.train.metrics import known_mode

OTHER = {ckpt.VAL: ckpt.VAL_EMA, ckpt.VAL_EMA: ckpt.VAL}


class DurableCheckpointIO(TorchCheckpointIO):
    """Write a file whole or not at all, see `cait.disk.atomic_write`.

    Only one process writes, and the others wait for it. So a failure is not raised but kept in `error`,
    and `LastCheckpoint` raises it on all processes. torch.save stores a CRC-32 of every tensor, which
    `cait.ckpt.is_whole` checks.
    """

    error: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """`storage_options` may be {"previous": file}: the checkpoint that was at `path` is kept there."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with disk.atomic_write(path, (storage_options or {}).get("previous")) as beside:
                with beside.open("wb") as file:  # given a path, torch writes its name into the file
                    torch.save(checkpoint, file)
                if code := torch.serialization.get_unsafe_globals_in_checkpoint(beside):
                    raise TypeError(f"a state holds {', '.join(code)}, which no run reads back: take numbers or text")
        except Exception as error:  # torch's, around that of a full disk; pickle's of the state of a user's callback
            cause = error if isinstance(error, OSError) else error.__context__ or error
            self.error = f"cannot write {path}: {getattr(cause, 'strerror', None) or cause}"


def newest_whole(folder: Path) -> Path | None:
    """The first of a run's checkpoints that is whole; None if there is no checkpoint.

    Raises UserError if all checkpoints are damaged.
    """
    found = checkpoints(folder)
    for path in found:
        if ckpt.is_whole(path):
            if path != found[0]:
                print(f"{found[0]} is damaged; going on from {path}", flush=True)
            return path
    if found:
        raise UserError(f"no checkpoint in {folder} is whole: begin again under another --run_name")
    return None


class LastCheckpoint(Checkpoint):
    """Save `last.ckpt` at intervals and after every epoch, and keep the one before as `previous.ckpt`.

    At SIGTERM, SIGINT, SIGUSR1 or SIGHUP the process finishes the running step, saves, and exits with 128 + the
    signal's number. Several processes agree on it every few steps, see `cait.run.signals`.

    Only whole optimizer steps are saved, because a checkpoint holds no accumulated gradients. A save that is due before
    a validation, or a stop, waits for the validation, because a checkpoint does not say whether it has run. Whatever
    ends training, even `trainer.should_stop` within an epoch, a resumed run goes on with the next batch.

    Args:
        every_n_steps: optimizer steps between two saves; None saves by time alone.
        every_n_minutes: minutes between two saves, by the clock of process 0; None saves by steps alone.
    """

    has_begun = False
    """Whether training has begun, so that the run can be resumed."""

    def __init__(self, folder: Path, every_n_steps: int | None = None, every_n_minutes: float | None = None) -> None:
        self.folder, self.every_n_steps, self.every_n_minutes = folder, every_n_steps, every_n_minutes
        self.signals = StopSignals()
        self._due, self._stop = False, 0

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":  # by now the data module has refused a checkpoint of other data
            images = getattr(trainer.datamodule, "world_batch_size", 1)  # type: ignore[attr-defined]
            before = (ckpt.data_state(checkpoint) or {}).get("world_batch_size", images)
            loops.continue_run(checkpoint, trainer, before, images)
            for callback in trainer.early_stopping_callbacks:  # Lightning would restore the patience of before
                if state := checkpoint["callbacks"].get(callback.state_key):
                    state["patience"] = callback.patience

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun, self._last_step = True, trainer.global_step
        self._last_save = time.monotonic()
        # Lightning forgets that a validation has ended the run, if a kill comes between its checkpoint and its end.
        trainer.should_stop |= any(0 < each.wait_count >= each.patience for each in trainer.early_stopping_callbacks)
        start, last, previous = trainer.ckpt_path, self.folder / LAST, self.folder / PREVIOUS
        resumes_previous = start is not None and Path(start).resolve() == previous.resolve()
        if trainer.is_global_zero and resumes_previous and not ckpt.is_whole(last):
            disk.remove(last)  # else the next save would put it in the place of previous.ckpt, the only whole one
        self.signals.watch(trainer)
        loops.end_steps_once(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step:  # gradients accumulate
            return
        self._last_step = trainer.global_step
        self._due |= self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if self.signals.is_due(trainer):
            self._ask(trainer)
        if not trainer.is_last_batch and not loops.validates_next(trainer):
            self._save_and_leave(trainer)  # else after the validation, or at the end of the epoch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._due |= trainer.global_step == 0  # what was done before the first step took time
        if not trainer.is_last_batch and not loops.accumulates(trainer):
            self._ask(trainer)
            self._save_and_leave(trainer)

    def _ask(self, trainer: Trainer) -> None:
        """Agree with the other processes on whether to save or to stop."""
        is_over = self.every_n_minutes is not None and time.monotonic() - self._last_save > 60 * self.every_n_minutes
        stop, save = self.signals.agreed(trainer, is_over)
        self._stop = self._stop or stop
        self._due = self._due or save

    def _save_and_leave(self, trainer: Trainer) -> None:
        """Save if it is due, and leave if a signal wants it."""
        if self._due or self._stop:
            if trainer.global_step:
                loops.end_step(trainer)
            self.save(trainer)
            self._leave(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch:
            loops.end_epoch(trainer)
        self.save(trainer)
        self._ask(trainer)
        self._leave(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 and not sum(trainer.num_val_batches):  # a solved head that nothing has validated
            self.save(trainer)
        self._raise_error(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.signals.restore()

    def save(self, trainer: Trainer) -> None:
        """Save. UserError on all processes if a checkpoint could not be written, now or since the last save."""
        options = {"previous": self.folder / PREVIOUS}
        trainer.save_checkpoint(self.folder / LAST, weights_only=False, storage_options=options)
        self._due, self._last_save = False, time.monotonic()
        self._raise_error(trainer)

    def _raise_error(self, trainer: Trainer) -> None:
        if error := trainer.strategy.broadcast(getattr(trainer.strategy.checkpoint_io, "error", None)):
            raise UserError(error)

    def _leave(self, trainer: Trainer) -> None:
        if self._stop:
            # Lightning kills a job at once if a process that it started fails, so such processes exit with 0.
            environment = getattr(trainer.strategy, "cluster_environment", None)
            is_child = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
            raise SystemExit(0 if is_child else 128 + self._stop)


class BestCheckpoint(ModelCheckpoint):
    """`best.ckpt` by a metric.

    Lightning forgets the best score if the folder has another path. Here a run whose folder was
    moved keeps it, as long as its file exists. A value that is not finite is never the best.

    Args:
        mode: "max" or "min"; None: as the metric says by its name.
    """

    def __init__(self, folder: Path, monitor: str = "val/acc1", mode: str | None = None) -> None:
        plain_name: dict[str, Any] = dict(enable_version_counter=False, auto_insert_metric_name=False)
        super().__init__(folder, Path(BEST).stem, monitor, mode=mode or known_mode(monitor, {}), **plain_name)
        self.metric = monitor
        self.other_score: float | None = None
        """The same metric of the other weights at the best score: of the raw ones if the average chooses."""

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        is_finite = current is None or trainer.strategy.reduce_boolean_decision(bool(current.isfinite()))
        is_best = is_finite and super().check_monitor_top_k(trainer, current)
        if is_best:
            weights, _, name = self.metric.partition("/")
            other = trainer.callback_metrics.get(f"{OTHER.get(weights)}/{name}")
            self.other_score = None if other is None else float(other)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"other_score": self.other_score}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises UserError if a metric of validation that a callback watches is none; those of training come later."""
        found = trainer.callback_metrics
        for each in trainer.callbacks if trainer.sanity_checking else ():  # type: ignore[attr-defined]
            metric, is_strict = str(getattr(each, "monitor", None)), getattr(each, "strict", True)
            if is_strict and metric not in found and (metric.startswith("val") or f"{ckpt.VAL}/{metric}" in found):
                who = "--best_metric" if each is self else f"{type(each).__name__} watches"
                raise UserError(f"{who} {metric}: there is no such metric, only {', '.join(sorted(found))}")
        if trainer.state.fn == "fit" and trainer.global_step == 0 and not trainer.sanity_checking:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))  # before the first epoch has begun
        else:
            super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.other_score = state_dict.get("other_score")
        best = str(Path(str(self.dirpath), BEST))
        if state_dict["best_k_models"] and Path(best).exists():  # else it starts from another run's checkpoint
            moved = {"dirpath": self.dirpath, "best_model_path": best, "kth_best_model_path": best}
            state_dict |= moved | {"best_k_models": {best: state_dict["best_model_score"]}}
        super().load_state_dict(state_dict)

"""Checkpoints that survive a kill, a full disk and a torn file. A signal to stop saves one too."""

import os
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from cait import ckpt, disk
from cait.ckpt import Checkpoint, State
from cait.errors import UserError
from cait.run.rundir import BEST, LAST, PREVIOUS, FolderGuard, checkpoints
from cait.run.signals import StopSignals
from cait.train.metrics import known_mode

LIMITS = "limits"
"""Key of what may end the run early."""
OTHER = {ckpt.VAL: ckpt.VAL_EMA, ckpt.VAL_EMA: ckpt.VAL}


class DurableCheckpointIO(TorchCheckpointIO):
    """Write a file whole or not at all, see `cait.disk.atomic_write`.

    Only one process writes, and the others wait for it. So a failure is not raised but kept in `error`,
    and `LastCheckpoint` raises it on all processes. torch.save stores a CRC-32 of every tensor, which
    `cait.ckpt.is_whole` checks.

    Args:
        folder: of the run; once it has gone nothing is written, whatever the path.
    """

    error: str | None = None

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.guard = FolderGuard(folder) if folder else None

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: Any, storage_options: Any = None
    ) -> None:
        """`storage_options` may be {"previous": file}: the checkpoint that was at `path` is kept there."""
        path = Path(path)
        try:
            if self.guard:
                self.guard.check()
            path.parent.mkdir(parents=True, exist_ok=True)
            with disk.atomic_write(path, (storage_options or {}).get("previous")) as beside:
                with beside.open("wb") as file:  # given a path, torch writes its name into the file
                    torch.save(checkpoint, file)
                if code := torch.serialization.get_unsafe_globals_in_checkpoint(beside):
                    raise TypeError(
                        f"a state holds {', '.join(code)}, which no run reads back: take numbers or text"
                    )
        except Exception as error:  # torch's, around that of a full disk; pickle's of the state of a user's callback
            cause = error if isinstance(error, OSError) else error.__context__ or error
            self.error = f"cannot write {path}: {getattr(cause, 'strerror', None) or cause}"


def newest_whole(folder: Path) -> Path | None:
    """The first of a run's checkpoints that is whole; None if there is no checkpoint.

    Raises UserError if all checkpoints are damaged.
    """
    paths = checkpoints(folder)
    for path in paths:
        if ckpt.is_whole(path):
            if path != paths[0]:
                print(f"{paths[0]} is damaged; going on from {path}", flush=True)
            return path
    if paths:
        raise UserError(f"no checkpoint in {folder} is whole: begin again under another --run_name")
    return None


def _limits(trainer: Trainer) -> State:
    """What decides whether early stopping, or the clock of --trainer.max_time, stops a run, by callback."""
    names = ("patience", "stopping_threshold", "divergence_threshold", "_duration")
    return {
        callback.state_key: [vars(callback).get(name) for name in names]
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping | Timer)
    }


class LastCheckpoint(Callback):
    """Save `last.ckpt` at intervals and after every epoch, and keep the one before as `previous.ckpt`.

    At SIGTERM, SIGINT, SIGUSR1 or SIGHUP the process finishes the running step, saves, and exits with 128 + the
    signal's number. Several processes agree on it every few steps, see `cait.run.signals`.

    Put it first among a Trainer's callbacks. It works between two batches: after all that the callbacks and Lightning
    do at the end of a batch or an epoch, and before anything that they do for the next.

    - `on_train_start`: note signals from now on.
    - `on_train_batch_start`, after an optimizer step: its metrics are logged, the schedule has moved, and if a
      validation was due, it is done. Save if it is time, leave if a signal has come. While gradients accumulate
      nothing is saved, because a checkpoint does not hold them.
    - `on_train_epoch_start`: the same for the epoch before; it always saves.
    - `on_train_end`: the same, whatever has ended training, maybe amid an epoch.
    - `teardown`: put the signals back.

    Args:
        every_n_steps: optimizer steps between two saves; None saves by time alone.
        every_n_minutes: minutes between two saves, by the clock of process 0; None saves by steps alone.
    """

    has_begun = False
    """Whether training has begun, so that the run can be resumed."""

    def __init__(
        self, folder: Path, every_n_steps: int | None = None, every_n_minutes: float | None = None
    ) -> None:
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.signals = StopSignals()

    @classmethod
    def among(cls, trainer: Trainer) -> list["LastCheckpoint"]:
        """Those of a Trainer."""
        return [callback for callback in trainer.callbacks if isinstance(callback, cls)]  # type: ignore[attr-defined]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint
    ) -> None:
        # What a limit has decided holds, unless it is another now.
        limits = _limits(trainer)
        before = checkpoint.get(LIMITS, {})
        if not before.items() <= limits.items():
            trainer.should_stop = trainer.asks_to_stop = False  # type: ignore[attr-defined]
        for callback in trainer.early_stopping_callbacks:
            now = limits[callback.state_key]
            state = checkpoint["callbacks"].get(callback.state_key)
            if state and before.get(callback.state_key, [state["patience"], *now[1:]]) != now:
                state |= {"patience": callback.patience, "stopping_reason": 0}
        for saver in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(saver.state_key)
            if state and isinstance(saver, ModelCheckpoint):
                _follow(state, str(saver.dirpath))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint
    ) -> None:
        checkpoint[LIMITS] = _limits(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True
        self._seen_step = self._saved_step = trainer.global_step
        self._last_save = time.monotonic()
        # Lightning forgets that a validation has ended the run, if a kill comes between its checkpoint and its end.
        reasons = [callback.stopping_reason.value for callback in trainer.early_stopping_callbacks]
        trainer.should_stop |= any(reasons)
        if trainer.is_global_zero:
            self._remove_damaged(trainer.ckpt_path)
        self.signals.watch(trainer)

    def _remove_damaged(self, start: Any) -> None:
        """Of a run that goes on from `previous.ckpt`: else a save would put the damaged file in its place."""
        last = self.folder / LAST
        previous = (self.folder / PREVIOUS).resolve()
        if start and Path(start).resolve() == previous and not ckpt.is_whole(last):
            disk.remove(last)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        # to solve it took time
        has_head = trainer.global_step == 0 and getattr(pl_module, "validates_first", False)
        if has_head or trainer.global_step != self._saved_step:
            self._save_or_leave(trainer, due=True, ask=True)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != self._seen_step:
            due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
            self._save_or_leave(trainer, due, ask=self.signals.is_due(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.ask_next()

    def _save_or_leave(self, trainer: Trainer, due: bool, ask: bool) -> None:
        """After a step: save if it is due, or process 0 says so; save and leave if a signal has come."""
        self._seen_step = trainer.global_step
        signal = 0
        if ask:
            minutes = (time.monotonic() - self._last_save) / 60
            is_late = self.every_n_minutes is not None and minutes > self.every_n_minutes
            signal, any_is_late = self.signals.agreed(trainer, is_late)
            due = due or any_is_late
        if due or signal:
            self.save(trainer)
        if signal:
            self._leave(trainer, signal)

    def _leave(self, trainer: Trainer, signal: int) -> NoReturn:
        # Lightning kills a job at once if a process that it started fails, so such processes exit with 0.
        environment = getattr(trainer.strategy, "cluster_environment", None)
        is_child = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        raise SystemExit(0 if is_child else 128 + signal)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a head may be solved at step 0
        is_due = trainer.global_step == 0 or trainer.global_step != self._saved_step
        self._save_or_leave(trainer, is_due, ask=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.signals.restore()
        self._raise_error(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save. UserError on all processes if a checkpoint could not be written, now or since the last save."""
        options = {"previous": self.folder / PREVIOUS}
        trainer.save_checkpoint(self.folder / LAST, weights_only=False, storage_options=options)
        self._saved_step = trainer.global_step
        self._last_save = time.monotonic()
        self._raise_error(trainer)

    def _raise_error(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        error = strategy.broadcast(getattr(strategy.checkpoint_io, "error", None))
        if error:
            raise UserError(error)


def _follow(state: State, folder: str) -> None:
    """Name the files of a ModelCheckpoint where they lie now, if the run's folder was moved.

    Lightning would forget the best ones, and no longer delete them.
    """
    old = str(state["dirpath"])
    scores = {path.replace(old, folder, 1): score for path, score in state["best_k_models"].items()}
    # else it starts from another run's checkpoint
    if scores and all(map(os.path.exists, scores)):
        for name in ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path"):
            state[name] = state[name].replace(old, folder, 1)
        state["best_k_models"] = scores


class BestCheckpoint(ModelCheckpoint):
    """`best.ckpt` by a metric. A value that is not finite is never the best.

    Args:
        mode: "max" or "min"; None: as the metric says by its name.
    """

    def __init__(self, folder: Path, monitor: str = "val/acc1", mode: str | None = None) -> None:
        super().__init__(
            folder,
            Path(BEST).stem,
            monitor,
            mode=mode or known_mode(monitor, {}),
            enable_version_counter=False,
            auto_insert_metric_name=False,
        )
        self.metric = monitor
        self.other_score: float | None = None
        """The same metric of the other weights at the best score: of the raw ones if the average chooses."""

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        is_finite = current is None or trainer.strategy.reduce_boolean_decision(
            bool(current.isfinite())
        )
        is_best = is_finite and super().check_monitor_top_k(trainer, current)
        if is_best:
            weights, _, name = self.metric.partition("/")
            other = trainer.callback_metrics.get(f"{OTHER.get(weights)}/{name}")
            self.other_score = None if other is None else float(other)
        return is_best

    def state_dict(self) -> State:
        return super().state_dict() | {"other_score": self.other_score}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises UserError if a metric of validation that a callback watches is none; those of training come later."""
        if trainer.sanity_checking:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                self._check_watched(callback, trainer.callback_metrics)
        if trainer.state.fn == "fit" and trainer.global_step == 0 and not trainer.sanity_checking:
            # before the first epoch has begun
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        else:
            super().on_validation_end(trainer, pl_module)

    def _check_watched(self, callback: Any, metrics: State) -> None:
        name = str(getattr(callback, "monitor", None))
        is_of_validation = name.startswith("val") or f"{ckpt.VAL}/{name}" in metrics
        is_strict = getattr(callback, "strict", True)
        if name in metrics or not is_strict or not is_of_validation:
            return
        who = f"{type(callback).__name__} watches"
        if callback is self:
            who = "--best_metric"
        known = ", ".join(sorted(metrics))
        raise UserError(f"{who} {name}: there is no such metric, only {known}")

    def load_state_dict(self, state_dict: State) -> None:
        self.other_score = state_dict.get("other_score")
        best = Path(str(self.dirpath), BEST)
        # else it starts from another run's checkpoint, or the file has gone
        if state_dict["best_k_models"] and ckpt.is_whole(best):
            super().load_state_dict(state_dict)
        elif best.exists():
            rank_zero_info(f"{best} is damaged: the next validation puts another in its place")

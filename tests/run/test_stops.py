"""Whatever ends training, amid an epoch, at its end or amid an accumulation: the next batch comes next."""

import functools
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import slow
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    Timer,
)
from modules import FIELDS, precision_of, trainer
from same import same

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.loops import Position
from cait.run import signals
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint, newest_whole
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import CaiTModule

BATCHES = 8
"""Of an epoch. Three batches a step leave two for its last step."""


def stop_at(hook: str, batches: int) -> Callback:
    """`should_stop` in one of the hooks, once a number of batches is done."""

    def stop(trainer: Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        trainer.should_stop |= done >= batches and not trainer.sanity_checking

    return LambdaCallback(**{hook: stop})


class Steps(Timer):
    """A Timer whose clock counts batches."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        super().on_train_batch_end(trainer)

    def time_elapsed(self, stage: str = "train") -> float:
        return getattr(self, "batches", 0)


class StopsByItself(CaiTModule):
    """Its own hook stops, after those of all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop |= self.trainer.fit_loop.total_batch_idx == 4


class FollowsAMetric(CaiTModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"},
        }


class OneCycle(CaiTModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        # it changes betas too
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(CaiTModule):
    """One group, where the settings would give two."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/acc1"},
        }


class WithClosure(CaiTModule):
    """It computes several losses a step, and keeps lists of tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Listed(CaiTModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedules = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            {
                "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9),
                "interval": "step",
            },
        ]
        return [optimizer], schedules


class MoreGroups(CaiTModule):
    """A parameter of its own joins those of the settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(images)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = configured["optimizer"]
        optimizer.add_param_group({"params": [self.scale], "lr": 1e-2})
        return {"optimizer": optimizer}


class ByHand(CaiTModule):
    """Two optimizers and their schedules, clipped and stepped by its own code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        *others, head = self.model.children()
        optimizers = [
            torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([p for other in others for p in other.parameters()], fused=True),
        ]
        return optimizers, [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers
        ]


OPTIMIZERS = (Plateau, WithClosure, Listed, MoreGroups, ByHand)


@pytest.fixture(scope="module")
def fit(
    digits_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Train two epochs; returns the last checkpoint."""

    def run(
        stop: Callback | None = None,
        folder: Path | None = None,
        kind: Any = CaiTModule,
        **settings: Any,
    ) -> dict[str, Any]:
        start = folder / "last.ckpt" if folder and (folder / "last.ckpt").exists() else None
        start = settings.pop("start", start)
        folder = folder or tmp_path_factory.mktemp("run")
        data = dict(
            root=str(digits_root), img_size=8, num_workers=0, cutmix=0.0, check_resume=False
        )
        data["batch_size"] = settings.pop("batch_size", 64)
        schedule = settings.pop("schedule", "cosine")
        torch.manual_seed(0)
        network = dict(
            img_size=8, num_classes=10, fields=FIELDS, drop_path_rate=0.2, lr_base_size=None
        )
        net = kind(schedule=schedule, warmup_epochs=0.25, **network)
        limits: dict = dict(limit_train_batches=BATCHES, limit_val_batches=1)
        early = (
            [settings.pop("early")("val/loss", patience=1, min_delta=99.0)]
            if "early" in settings
            else []
        )
        early += settings.pop("callbacks", [])
        last = LastCheckpoint(folder, settings.pop("every_n_steps", None))
        fitting = trainer(
            callbacks=[last, *([stop] if stop else []), *early, StepSeed(0), EMA(0.9)],
            **limits | dict(plugins=[DurableCheckpointIO()]) | settings,
        )
        fitting.fit(net, datamodule=ImageNetDataModule(**data), ckpt_path=start)
        checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
        checkpoint["folder"], checkpoint["rates"] = (
            folder,
            fitting.optimizers[0].param_groups[-1]["lr"],
        )
        return checkpoint

    return run


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(got[part], expected[part]), part
    assert same(got["callbacks"]["EMA"], expected["callbacks"]["EMA"])
    assert Position.saved(got) == Position.saved(expected)
    loops, other = got["loops"]["fit_loop"], expected["loops"]["fit_loop"]
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"):
        assert loops[name] == other[name], name


@pytest.fixture(scope="module")
def whole(fit: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Runs that nothing stopped, by their settings."""
    return functools.cache(fit)


WAYS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "max_steps amid an epoch": (lambda accumulated: dict(max_steps=5 // accumulated), 5),
    "max_steps amid the second": (
        lambda accumulated: dict(max_steps=-(-BATCHES // accumulated) + 2),
        2,
    ),
    "max_time": (lambda _: dict(stop=Steps(dict(seconds=5))), 5),
    "early stopping": (
        lambda _: dict(stop=EarlyStopping("val/loss", patience=1, min_delta=99.0)),
        6,
    ),
    "own callback after a batch": (lambda _: dict(stop=stop_at("on_train_batch_end", 5)), 5),
    "pruned after a validation": (lambda _: dict(stop=stop_at("on_validation_end", 5)), 6),
    "own callback at the end of an epoch": (
        lambda _: dict(stop=stop_at("on_train_epoch_end", 1)),
        0,
    ),
    "the module's own hook": (lambda _: dict(kind=StopsByItself), 5),
}
"""How a run is stopped, given the batches of a step, and the batches of its epoch done, if a step has one."""


ACCUMULATED = (
    "max_steps amid an epoch",
    "early stopping",
    "own callback after a batch",
    "the module's own hook",
)
EACH = [*((way, 1) for way in WAYS), *((way, 3) for way in ACCUMULATED)]
OFTEN = ("max_steps amid the second", 1), ("early stopping", 3), ("own callback after a batch", 1)


@pytest.mark.parametrize(
    ("way", "accumulated"), [*OFTEN, *slow(*(each for each in EACH if each not in OFTEN))]
)
def test_a_stopped_run_ends_with_the_bits_of_one_left_alone(
    way: str, accumulated: int, fit: Callable, whole: Callable
) -> None:
    how, batch = WAYS[way]
    # Whoever limits the steps shortens the cosine; the constant rate does not depend on it.
    shape = dict(schedule="constant") if "max_steps" in way else {}
    common: dict = dict(accumulate_grad_batches=accumulated, val_check_interval=3, **shape)
    expected, stopped = whole(**common), fit(**common, **how(accumulated))
    if accumulated == 1:
        assert Position.saved(stopped).batch == batch
    assert stopped["global_step"] < expected["global_step"]
    assert_equal(fit(folder=stopped["folder"], **common), expected)


@pytest.mark.parametrize("accumulated", [1, *slow(3)])
@pytest.mark.parametrize(
    "precision", ["64-true", *slow("bf16-true", "bf16-mixed", "16-true", "16-mixed")]
)
def test_a_run_of_any_precision_is_resumed_to_the_bit(
    precision: str, accumulated: int, fit: Callable
) -> None:
    def run(stop: Callback | None = None, folder: Path | None = None) -> dict[str, Any]:
        settings = precision_of(precision)  # anew: a scaler keeps a state
        settings["plugins"] = [DurableCheckpointIO(), *settings.pop("plugins", [])]
        return fit(stop, folder, accumulate_grad_batches=accumulated, **settings)

    stopped = run(stop_at("on_train_batch_end", 5))
    assert_equal(run(folder=stopped["folder"]), run())


@pytest.mark.parametrize("batches", [5, *slow(BATCHES)])
@pytest.mark.parametrize(
    "settings",
    [
        dict(kind=FollowsAMetric),
        *slow(dict(kind=OneCycle), dict(check_val_every_n_epoch=2)),
        dict(check_val_every_n_epoch=None, val_check_interval=5),
    ],
    ids=["a schedule that follows a metric", "OneCycleLR", "every second epoch", "across epochs"],
)
def test_what_goes_by_epochs_and_validations_goes_on(
    settings: dict, batches: int, fit: Callable, whole: Callable
) -> None:
    stopped = fit(stop_at("on_train_batch_end", batches), **settings)
    assert_equal(fit(folder=stopped["folder"], **settings), whole(**settings))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_ones_own_go_on_as_they_are(
    kind: type[CaiTModule], fit: Callable, whole: Callable
) -> None:
    stopped = fit(stop_at("on_train_batch_end", 5), kind=kind)
    expected = whole(kind=kind)
    resumed = fit(folder=stopped["folder"], kind=kind)
    assert_equal(resumed, expected)
    assert resumed["rates"] == expected["rates"]


def test_a_run_that_max_steps_will_end_goes_on_between_epochs(
    fit: Callable, whole: Callable
) -> None:
    limits: dict = dict(max_steps=12, schedule="constant")
    stopped = fit(stop_at("on_train_epoch_end", 1), **limits)
    assert Position.saved(stopped) == (1, 0, BATCHES)
    assert_equal(fit(folder=stopped["folder"], **limits), whole(**limits))


def test_accumulation_that_changes_by_epoch_goes_on_amid_one(fit: Callable) -> None:
    def by_epoch() -> list[Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2})]

    stopped = fit(stop_at("on_train_batch_end", BATCHES + 4), callbacks=by_epoch())
    assert Position.saved(stopped) == (1, 4, BATCHES + 2)
    assert_equal(fit(folder=stopped["folder"], callbacks=by_epoch()), fit(callbacks=by_epoch()))


def test_a_patience_that_has_run_out_ends_a_resumed_run_too_unless_it_has_more(
    fit: Callable,
) -> None:
    def patient(metric: str, **settings: Any) -> EarlyStopping:
        return EarlyStopping(metric, **settings | dict(patience=9))

    decided = fit(early=EarlyStopping, max_epochs=5)
    again = fit(early=EarlyStopping, max_epochs=5, folder=decided["folder"])
    assert decided["global_step"] == again["global_step"] == 2 * BATCHES
    assert fit(early=patient, max_epochs=5, folder=decided["folder"])["global_step"] == 5 * BATCHES
    # Without any patience it has not run out before the first validation.
    impatient = fit(
        early=lambda metric, **_: EarlyStopping(metric, patience=0),
        limit_train_batches=1,
        max_epochs=1,
    )
    assert impatient["global_step"] == 1


class Plan(CaiTModule):
    """Logs a metric that gets worse, better and worse again."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("plan", (0.5, 0.4, 0.6, 0.7, 0.3, 0.2)[self.trainer.current_epoch])


def ask_once(trainer: Trainer, *_: Any) -> None:
    trainer.should_stop |= trainer.fit_loop.total_batch_idx == 2


def watch(**settings: Any) -> Callable[[], Callback]:
    return lambda: EarlyStopping("plan", mode="max", **settings)


def leave_at(step: int) -> Callback:
    """Ends a run before a step, as a kill does."""

    def leave(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == step:
            raise SystemExit

    return LambdaCallback(on_train_batch_start=leave)


ASKED: dict[str, tuple[Callable[[], Callback], dict[str, int], int]] = {
    "a patience": (watch(patience=1), dict(min_epochs=4), 12),
    "a threshold": (watch(stopping_threshold=0.45), dict(min_epochs=4), 12),
    "a divergence": (watch(divergence_threshold=0.45, patience=9), dict(min_steps=11), 11),
    "a callback": (lambda: LambdaCallback(on_train_batch_end=ask_once), dict(min_epochs=4), 12),
    "a callback, until a step": (
        lambda: LambdaCallback(on_train_batch_end=ask_once),
        dict(min_steps=10),
        10,
    ),
}
"""Who asks a run to stop, what it waits for, and the step at which it then ends."""


@pytest.mark.parametrize(
    "way",
    ["a patience", "a callback, until a step", *slow("a threshold", "a divergence", "a callback")],
)
def test_a_run_that_waits_to_stop_ends_where_one_left_alone_does(
    way: str, fit: Callable, tmp_path: Path
) -> None:
    make, least, end = ASKED[way]
    common: dict = dict(kind=Plan, limit_train_batches=3, max_epochs=6, **least)
    whole = fit(make(), **common)
    assert whole["global_step"] == end
    with pytest.raises(SystemExit):
        fit(make(), folder=tmp_path, callbacks=[leave_at(8)], every_n_steps=7, **common)
    assert_equal(fit(make(), folder=tmp_path, **common), whole)


def test_a_run_that_waits_to_stop_goes_on_if_it_has_more_patience(
    fit: Callable, tmp_path: Path
) -> None:
    common: dict = dict(kind=Plan, limit_train_batches=1, max_epochs=6, min_epochs=4)
    with pytest.raises(SystemExit):
        fit(watch(patience=1)(), folder=tmp_path, callbacks=[leave_at(3)], **common)
    assert fit(watch(patience=9)(), folder=tmp_path, **common)["global_step"] == 6


@pytest.mark.parametrize(
    ("seconds", "end"), [(5, 2 * BATCHES), (99, 3 * BATCHES), (None, 3 * BATCHES)]
)
def test_a_run_that_waits_to_stop_goes_on_if_it_has_more_time(
    seconds: int | None, end: int, fit: Callable, tmp_path: Path
) -> None:
    common: dict = dict(folder=tmp_path, max_epochs=3, min_epochs=2)
    with pytest.raises(SystemExit):
        fit(Steps(dict(seconds=5)), callbacks=[leave_at(8)], every_n_steps=7, **common)
    clock = Steps(dict(seconds=seconds)) if seconds else None
    assert fit(clock, **common)["global_step"] == end


def test_a_run_that_has_reached_its_threshold_stays_ended_unless_it_is_another(
    fit: Callable,
) -> None:
    common: dict = dict(kind=Plan, limit_train_batches=1, max_epochs=6)
    ended = fit(watch(stopping_threshold=0.55)(), **common)
    again = fit(watch(stopping_threshold=0.55)(), folder=ended["folder"], **common)
    assert ended["global_step"] == again["global_step"] == 3
    higher = fit(watch(stopping_threshold=0.65)(), folder=ended["folder"], **common)
    assert higher["global_step"] == 4


@pytest.mark.parametrize(
    "limits",
    [dict(min_steps=17), dict(min_epochs=2, max_steps=9), dict(min_steps=4, max_steps=3)],
    ids=str,
)
def test_a_least_length_beyond_the_end_is_refused(limits: dict[str, int], fit: Callable) -> None:
    with pytest.raises(UserError, match=r"^the run ends after \d+ steps, before the \d+ of"):
        fit(**limits)


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "epoch", "begun"),
    [(32, 4, 12, 8), *slow((32, 1, 12, 10), (96, 1, 12, 3))],
)
def test_another_batch_goes_on_at_the_image_that_was_reached(
    batch_size: int, accumulated: int, epoch: int, begun: int, fit: Callable
) -> None:
    """Or a little before it, where a step begins: the run has done 5 batches of 64."""
    stopped = fit(stop_at("on_train_batch_end", 5))
    again = dict(
        batch_size=batch_size, accumulate_grad_batches=accumulated, limit_train_batches=epoch
    )
    ended = fit(folder=stopped["folder"], **again)
    each = -(-epoch // accumulated)
    assert ended["global_step"] == 5 + (each - begun // accumulated) + each


@pytest.mark.parametrize("save", ["on_train_batch_end", *slow("on_validation_end")])
def test_a_checkpoint_of_any_hook_is_gone_on_from(
    save: str, fit: Callable, whole: Callable, tmp_path: Path
) -> None:
    """Lightning's own ModelCheckpoint saves amid an accumulation and after a validation too."""
    common: dict = dict(accumulate_grad_batches=3, val_check_interval=4)
    every = dict(every_n_train_steps=2) if save == "on_train_batch_end" else dict(every_n_epochs=1)
    fit(
        ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, **every),
        enable_checkpointing=True,
        **common,
    )
    end = whole(**common)["global_step"]
    files = [file for file in tmp_path.iterdir() if f"step={end}" not in file.name]
    assert len(files) >= 2
    for number, file in enumerate(files):
        folder = tmp_path / f"from-{number}"
        folder.mkdir()
        file.replace(folder / "last.ckpt")
        assert_equal(fit(folder=folder, **common), whole(**common))


@pytest.mark.parametrize("accumulated", [2, *slow(1)])
def test_a_signal_before_a_validation_saves_and_stops_after_it(
    accumulated: int, fit: Callable, whole: Callable, tmp_path: Path
) -> None:
    """Also if a validation follows every step, so that there is no step without one."""
    common: dict = dict(accumulate_grad_batches=accumulated, val_check_interval=1)

    def send(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        fit(LambdaCallback(on_train_batch_end=send), tmp_path, **common)
    assert left.value.code == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert_equal(fit(folder=tmp_path, **common), whole(**common))


@pytest.mark.parametrize(
    ("settings", "batches"),
    [(dict(val_check_interval=1), [2, 4, 6, 0]), (dict(accumulate_grad_batches=2), [4, 0])],
)
def test_a_save_is_made_once_after_a_step_and_its_validation(
    settings: dict, batches: list[int], fit: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Position] = []
    save = LastCheckpoint.save
    monkeypatch.setattr(
        LastCheckpoint, "save", lambda *of: saved.append(Position.now(of[1])) or save(*of)
    )
    fit(every_n_steps=2, max_epochs=1, **settings)
    assert [position.batch for position in saved] == batches


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_that_a_run_goes_on_from(
    tmp_path: Path,
) -> None:
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    for start, stays in ((tmp_path / "other.ckpt", True), (None, True), (previous, False)):
        last.write_bytes(b"torn")
        torch.save({"global_step": 1}, previous)
        LastCheckpoint(tmp_path)._remove_damaged(start)
        assert last.exists() is stays


def test_a_kill_in_the_first_save_after_a_damaged_checkpoint_leaves_a_whole_one(
    fit: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(folder=tmp_path, max_steps=1)
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    last.rename(previous)
    last.write_bytes(b"torn")
    replace = os.replace

    def killed(source: Any, target: Any) -> None:
        if target == last:  # what was there is `previous` by now
            raise SystemExit
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(SystemExit):
        fit(folder=tmp_path, start=previous, max_steps=2, every_n_steps=1)
    assert newest_whole(tmp_path) == previous


def test_processes_agree_after_fewer_steps_if_steps_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    strategy = SimpleNamespace(root_device="cpu", reduce=lambda told, reduce_op: told)
    fit: Any = SimpleNamespace(global_step=0, world_size=2, is_global_zero=True, strategy=strategy)
    fit.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())
    for seconds, steps in ((0.01, 10), (0.6, 8), (12.0, 1)):
        watched, asked = signals.StopSignals(), []
        fit.global_step = 0
        watched.watch(fit)
        for step in range(1, 41):
            now += seconds
            fit.global_step = step
            if watched.is_due(fit):
                watched.agreed(fit, save=False)
                asked.append(step)
        watched.restore()
        assert {later - earlier for earlier, later in pairwise(asked)} == {steps}

"""Whatever ends training, amid an epoch, at its end or amid an accumulation: the next batch comes next."""

import json
import os
import signal

import pytest
import torch
from harness import slow, table
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,  # noqa: F401  # in the table
    GradientAccumulationScheduler,  # noqa: F401
    ModelCheckpoint,
    Timer,
)
from modules import FIELDS, images_in, module, precision_of, trainer
from same import same
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from cait.errors import UserError
from cait.loops import Position
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import CaiTModule

BATCHES = 8
"""Of an epoch. Three batches a step leave two for its last step."""


# The callbacks of the table


def batches_done(trainer):
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


class At(Callback):
    """Acts in one of the hooks when so many batches are done, or under way."""

    def __init__(self, hook, batches, act):
        self.batches = batches
        self.act = act
        setattr(self, hook, self.look)

    def look(self, trainer, *_):
        if batches_done(trainer) != self.batches or trainer.sanity_checking:
            return
        if self.act == "stop":
            trainer.should_stop = True
        elif self.act == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise SystemExit(0)  # as a kill


class Steps(Timer):
    """A Timer whose clock counts batches."""

    batches = 0

    def on_train_batch_end(self, trainer, *_):
        self.batches = batches_done(trainer)
        super().on_train_batch_end(trainer)

    def time_elapsed(self, stage="train"):
        return self.batches


# The modules of the table


class StopsByItself(CaiTModule):
    """Its own hook stops, after those of all callbacks."""

    def on_train_batch_end(self, *_):
        if batches_done(self.trainer) == 5:
            self.trainer.should_stop = True


class GetsWorse(CaiTModule):
    """Logs a metric that gets worse, better and worse again."""

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("plan", (0.5, 0.4, 0.6, 0.7, 0.3, 0.2)[self.trainer.current_epoch])


class Plateau(CaiTModule):
    """One group, where the settings would give two."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"},
        }


class WithClosure(CaiTModule):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoSchedules(CaiTModule):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        by_step = OneCycleLR(optimizer, 1e-2, total_steps=40)
        by_epoch = ExponentialLR(optimizer, 0.5)
        return [optimizer], [by_epoch, {"scheduler": by_step, "interval": "step"}]


class MoreGroups(CaiTModule):
    """A parameter of its own joins those of the settings."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images):
        return self.scale * super().forward(images)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()["optimizer"]
        optimizer.add_param_group({"params": [self.scale], "lr": 1e-2})
        return optimizer


class ByHand(CaiTModule):
    """Two optimizers and their schedules, clipped and stepped by its own code."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            schedule.step()

    def configure_optimizers(self):
        *body, head = self.model.children()
        optimizers = [
            torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(torch.nn.ModuleList(body).parameters(), fused=True),
        ]
        return optimizers, [ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


# Runs


@pytest.fixture(scope="module")
def fit(digits_root, tmp_path_factory):
    """Train two epochs in a folder, from its last checkpoint if there is one; returns the last checkpoint then."""

    def run(row, folder=None, **more):
        settings = dict(limit_train_batches=BATCHES, limit_val_batches=1) | row | more
        folder = folder or tmp_path_factory.mktemp("run")
        last = folder / "last.ckpt"
        start = last if last.exists() else None
        torch.manual_seed(0)
        net = module(
            globals()[settings.pop("module", "CaiTModule")],
            num_classes=10,
            fields=FIELDS,
            drop_path_rate=0.2,
            warmup_epochs=0.25,
            schedule=settings.pop("schedule", "cosine"),
        )
        batch_size = settings.pop("batch_size", 4)
        own = dict(img_size=8, cutmix=0.0, check_resume=False)
        data = images_in(digits_root, batch_size=batch_size, **own)
        callbacks = [LastCheckpoint(folder, settings.pop("every_n_steps", None))]
        for part in ("watch", "stop"):
            for name, arguments in settings.pop(part, {}).items():
                callbacks.append(globals()[name](**arguments))
        callbacks += [*settings.pop("callbacks", []), StepSeed(0), EMA(0.9)]
        settings |= precision_of(settings.pop("precision", "32-true"))
        plugins = [DurableCheckpointIO(), *settings.pop("plugins", [])]
        training = trainer(callbacks=callbacks, plugins=plugins, **settings)
        status = 0
        try:
            training.fit(net, datamodule=data, ckpt_path=start)
        except SystemExit as end:
            status = end.code
        rate = training.optimizers[0].param_groups[-1]["lr"]
        checkpoint = torch.load(last, weights_only=True)
        return checkpoint | dict(folder=folder, status=status, rate=rate)

    return run


@pytest.fixture(scope="module")
def whole(fit):
    """Runs that nothing stopped, by their settings."""

    runs = {}

    def run(settings):
        key = json.dumps(settings)
        if key not in runs:
            runs[key] = fit(settings)
        return runs[key]

    return run


def assert_equal(got, expected):
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "rate"):
        assert same(got[part], expected[part]), part
    assert same(got["callbacks"]["EMA"], expected["callbacks"]["EMA"])
    assert Position.saved(got) == Position.saved(expected)
    loops, other = got["loops"]["fit_loop"], expected["loops"]["fit_loop"]
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"):
        assert loops[name] == other[name], name


@pytest.mark.parametrize("row", table(__file__, "same bits"))
def test_a_run_that_is_cut_off_ends_with_the_bits_of_one_left_alone(row, fit, whole):
    expected = whole(row["run"])
    cut = fit(row["run"] | row["cut"])
    if "position" in row:
        assert [*Position.saved(cut)] == row["position"]
    if "steps" in row:
        assert [cut["global_step"], expected["global_step"]] == row["steps"]
    assert cut["status"] == row.get("status", 0)
    assert cut["global_step"] < expected["global_step"]
    assert_equal(fit(row["run"], cut["folder"]), expected)


@pytest.mark.parametrize("row", table(__file__, "another length"))
def test_a_run_goes_on_by_what_it_is_resumed_with(row, fit):
    cut = fit(row["run"] | row["cut"])
    resumed = fit(row["run"] | row.get("then", {}), cut["folder"])
    assert [cut["global_step"], resumed["global_step"]] == row["steps"]


@pytest.mark.parametrize("row", table(__file__, "beyond the end"))
def test_a_least_length_beyond_the_end_is_refused(row, fit):
    with pytest.raises(UserError, match="min_epochs or min_steps"):
        fit(row)


@pytest.mark.parametrize(
    "every", [dict(every_n_train_steps=2), *slow(dict(every_n_epochs=1))], ids=str
)
def test_a_checkpoint_of_any_hook_is_gone_on_from(every, fit, whole, tmp_path):
    """Lightning's own ModelCheckpoint saves amid an accumulation and after a validation too."""
    settings = dict(accumulate_grad_batches=3, val_check_interval=4)
    expected = whole(settings)
    saver = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, **every)
    fit(settings, callbacks=[saver], enable_checkpointing=True)
    files = [file for file in tmp_path.iterdir() if "step=6" not in file.name]  # but the end
    assert len(files) >= 2
    for number, file in enumerate(files):
        (tmp_path / str(number)).mkdir()
        file.replace(tmp_path / f"{number}/last.ckpt")
        assert_equal(fit(settings, tmp_path / str(number)), expected)


@pytest.mark.parametrize(
    ("settings", "batches"),
    [(dict(val_check_interval=1), [2, 4, 6, 0]), (dict(accumulate_grad_batches=2), [4, 0])],
)
def test_a_save_is_made_once_after_a_step_and_its_validation(settings, batches, fit, monkeypatch):
    saved = []
    save = LastCheckpoint.save

    def note(callback, trainer):
        saved.append(Position.now(trainer).batch)
        save(callback, trainer)

    monkeypatch.setattr(LastCheckpoint, "save", note)
    fit(settings, every_n_steps=2, max_epochs=1)
    assert saved == batches

"""The speed of a run: what throughput.csv holds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from harness import rows
from lightning.pytorch import Callback
from modules import FIELDS, module, trainer

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras import clock
from cait.extras.clock import Clock
from cait.extras.gmacs import ForwardCost, forward_gmacs
from cait.extras.throughput import log
from cait.extras.throughput.log import COLUMNS, ThroughputLog
from cait.model.network import create_model
from cait.run.loggers import run_loggers


def data(root: Path, **settings: Any) -> ImageNetDataModule:
    common: dict[str, Any] = dict(root=str(root), img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    return ImageNetDataModule(**(common | settings))


def test_the_speed_is_in_a_file_of_its_own_and_goes_on(digits_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def fit(steps: int, every: int | None) -> None:
        given = data(digits_root, batch_size=16)
        speed = ThroughputLog(given, measure := Clock(), ForwardCost(), every)
        settings: dict[str, Any] = dict(logger=run_loggers(run, 0), log_every_n_steps=4, default_root_dir=run)
        trainer(max_steps=steps, max_epochs=-1, callbacks=[measure, speed], limit_val_batches=1, **settings).fit(
            module(num_classes=10), given
        )

    fit(9, None)
    fit(6, 3)
    with (run / "throughput.csv").open() as file:
        measured = list(csv.DictReader(file))
    assert [int(row["step"]) for row in measured] == [3, 7, 2, 5]
    assert tuple(measured[0]) == COLUMNS
    assert all(float(row["images_per_second"]) > 0 and float(row["memory_gb"]) > 0.05 for row in measured)
    assert {row["mfu"] for row in measured} == {""}
    assert not set(rows(run)[0]) & {*COLUMNS[1:], *(f"throughput/{name}" for name in COLUMNS)}
    with pytest.raises(UserError, match="throughput_every_n_steps must be at least 1"):
        ThroughputLog(data(digits_root), Clock(), ForwardCost(), 0)


def test_the_speed_is_the_images_over_the_time_without_validation(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Time(Callback):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def on_train_batch_start(self, *_: Any) -> None:
            self.now += 0.5

        def on_validation_batch_start(self, *_: Any) -> None:
            self.now += 100.0

    time = Time()
    monkeypatch.setattr(clock, "time", time)

    given = data(digits_root, batch_size=64)
    monkeypatch.setattr(log, "get_available_flops", lambda *_: 1e9)
    speed = ThroughputLog(given, measure := Clock(), ForwardCost(), 1)
    fit = trainer(
        max_steps=6, max_epochs=-1, callbacks=[time, measure, speed], val_check_interval=2, default_root_dir=tmp_path
    )
    fit.fit(module(num_classes=10), given)
    with (tmp_path / "throughput.csv").open() as file:
        measured = list(csv.DictReader(file))
    assert [float(row["images_per_second"]) for row in measured] == [128.0] * 6
    flops = 128 * 6e9 * forward_gmacs(create_model("xxs24", 8, 10, 0.0, **FIELDS), (3, 8, 8))
    assert [float(row["mfu"]) for row in measured] == pytest.approx([flops / 1e9] * 6, rel=1e-3)

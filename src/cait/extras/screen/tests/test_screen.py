"""What a run shows: warnings and a table at its start, metrics on a line, what was never right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from modules import FIELDS, loader, module, trainer
from starving import Time, train_starving

from cait.data import loader as loading
from cait.data.datamodule import ImageNetDataModule
from cait.extras import clock
from cait.extras.clock import Clock
from cait.extras.gmacs import forward_gmacs
from cait.extras.screen.banner import Banner, attention_in_use
from cait.extras.screen.doubts import checkpoint_bytes, doubts, shortage
from cait.extras.screen.progress import EpochLines
from cait.extras.screen.summary import findings
from cait.model.network import create_model
from cait.run.checkpoints import BestCheckpoint
from cait.train.ema import EMA


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (dict(warmup_epochs=3), {}, "the warm-up takes 18 steps (--model.warmup_epochs 3), the run has 12"),
        ({}, dict(limit_val_batches=0), "nothing is validated, so there will be no best.ckpt"),
        ({}, dict(limit_val_batches=1), "--trainer.limit_val_batches 1 scores one batch of 2"),
        ({}, dict(limit_val_batches=2), None),
        ({}, {}, None),
    ],
)
def test_senseless_settings_are_doubted(settings: dict, given: dict, words: str | None, tmp_path: Path) -> None:
    told: list[str] = []

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            told.extend(doubts(trainer, pl_module, None))
            trainer.should_stop = True

    recipe = dict(warmup_epochs=0.5) | settings
    saving: dict[str, Any] = dict(callbacks=[Spy(), BestCheckpoint(tmp_path)], enable_checkpointing=True)
    trainer(**saving, **given).fit(module(**recipe), loader(), loader(8))
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


@pytest.mark.parametrize(
    ("trained", "right", "words"),
    [
        (97.0, [3] * 7, "training is right in 97 % of the images, validation in 15.0 %, no better than chance"),
        (97.0, [6] * 7, None),  # 30 % of 140 images in 7 classes is no luck
        (80.0, [3] * 7, None),
        (float("nan"), [3] * 7, None),
        (80.0, [0, *[9] * 6], "1 of 7 classes are never right in the last validation (a): train longer"),
        (80.0, [0] * 6 + [9], "6 of 7 classes are never right in the last validation (a, b, c, d, e, ...): train"),
    ],
)
def test_what_a_validation_shows(trained: float, right: list[int], words: str | None) -> None:
    told = findings(trained, torch.tensor([[20, count] for count in right]), list("abcdefg"))
    assert len(told) == (words is not None), told
    assert words is None or told[0].startswith(words)


def data(root: Path, **settings: Any) -> ImageNetDataModule:
    common: dict[str, Any] = dict(root=str(root), img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    return ImageNetDataModule(**(common | settings))


def said(root: Path, folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> list[str]:
    given = data(root, batch_size=64)
    folder.mkdir(exist_ok=True)
    callbacks = [clock := Clock(), Banner(given, folder, clock), EMA(0.9)]
    fit = trainer(callbacks=callbacks, max_epochs=2, limit_val_batches=0, default_root_dir=folder, **settings)
    fit.fit(module(num_classes=10, lr_base_size=512, lr=8e-3), given)
    return capsys.readouterr().out.splitlines()


def test_the_banner_says_what_will_run(
    digits_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(digits_root.parent)
    lines = said(Path(digits_root.name), tmp_path / "mine", capsys)
    net = create_model("xxs24", 8, 10, 0.0, **FIELDS)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    name = f"CaiT {FIELDS['depth']}×{FIELDS['embed_dim']}"
    start = [
        f"model     {name}, {parameters:,} parameters, {forward_gmacs(net, (3, 8, 8)):.3g} GMACs an image",
        "data      digits: 1,437 training and 360 validation images, 10 classes",
        "order     shuffled by seed 0",
    ]
    assert lines[:3] == start
    assert "batch     64 = 1 process × 64 images" in lines
    assert "optimizer adamw, weight decay 0.05" in lines
    assert "length    2 epochs, 44 steps; peak learning rate 0.001 = 0.008 × 64 / 512" in lines
    assert "device    CPU, 32-true, recompute attention" in lines
    assert sum("a step: about" in line for line in lines) == 1
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: the warm-up takes 110 steps (--model.warmup_epochs 5), the run has 44: the learning rate only rises"
    ]
    assert len(lines) == 11

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    drawn = said(Path(digits_root.name), tmp_path / "mine", capsys)
    assert "─ training mine ─" in drawn[0]
    assert len(drawn) <= 14
    assert max(map(len, drawn)) <= 80


def test_a_disk_that_is_too_small_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortage(tmp_path, 10**18) > 0
    assert shortage(tmp_path, 1) == 0
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").write_bytes(bytes(1000))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 500})())
    assert (shortage(tmp_path, 1500), shortage(tmp_path, 1700)) == (0, 200)
    (tmp_path / "checkpoints/last.ckpt").rename(tmp_path / "file")
    (tmp_path / "checkpoints/last.ckpt").mkdir()  # as sharded runs write them
    (tmp_path / "file").rename(tmp_path / "checkpoints/last.ckpt/rest.pt")
    assert (shortage(tmp_path, 1500), shortage(tmp_path, 1700)) == (0, 200)


def test_what_checkpoints_take_is_near_the_files_themselves(digits_root: Path, tmp_path: Path) -> None:
    fields = dict(embed_dim=96, depth=4, num_heads=2, patch_size=4)
    net = module(num_classes=10, fields=fields)
    fit = trainer(max_steps=1, callbacks=[EMA(0.9), Checkpoint()], enable_checkpointing=True, limit_val_batches=0)
    fit.fit(net, data(digits_root, batch_size=8))
    fit.save_checkpoint(tmp_path / "x.ckpt")
    assert checkpoint_bytes(fit, net) / 4 == pytest.approx((tmp_path / "x.ckpt").stat().st_size, rel=0.1)


def test_the_backends_of_attention_are_named() -> None:
    fields = dict(patch_size=8, embed_dim=32, num_heads=2, depth=2)
    for backend in ("recompute", "reference"):
        network = create_model("xxs24", 16, 10, attention_backend=backend, **fields)
        assert attention_in_use(network) == f", {backend} attention"
    assert attention_in_use(create_model("xxs24", 16, 10, talking_heads=False, **fields)) == ""


def test_the_count_for_any_network() -> None:
    net = torch.nn.Conv2d(3, 8, 4, stride=4).train()
    assert forward_gmacs(net, (3, 32, 32)) == pytest.approx(8 * 8 * 8 * 3 * 4 * 4 / 1e9)
    assert net.training
    assert next(net.parameters()).device.type == "cpu"
    assert forward_gmacs(torch.nn.Linear(3, 3), (3, 8, 8)) is None


def test_the_epochs_line_has_the_means_of_the_epoch_and_its_own_validation(tmp_path: Path, capsys) -> None:
    losses: list[float] = []
    steps = LambdaCallback(on_train_batch_end=lambda *args: losses.append(args[2]["loss"].item()))
    shown = [steps, clock := Clock(), EpochLines(clock)]
    fit = trainer(max_epochs=3, check_val_every_n_epoch=2, default_root_dir=tmp_path, callbacks=shown)
    fit.fit(module(lr=1e-2, warmup_epochs=0, per_class=True), loader(), loader(8))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    for line, part in zip(lines, (losses[:6], losses[6:12], losses[12:]), strict=True):
        assert f"loss: {sum(part) / 6:.3f}  " in line
        assert re.search(r" s, waited \d+\.\d s of \d+\.\d s for images \(\d+%\)$", line)
    for name in ("val/acc1: ", "val/acc1_macro: "):
        assert [name in line for line in lines] == [False, True, False]


def test_the_epochs_line_says_how_long_its_steps_waited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time()
    for part in (clock, loading):
        monkeypatch.setattr(part, "time", time)
    train_starving(time, 1.0, 3.0, measure := Clock(), EpochLines(measure))
    line = r"^epoch (\d)/2 .* waited (\d+\.\d) s of (\d+\.\d) s for images \((\d+)%\)$"
    found = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert found == [(epoch, "30.0", "40.0", "75") for epoch in ("1", "2")]

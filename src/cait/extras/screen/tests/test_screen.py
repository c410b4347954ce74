"""What a run shows: warnings and a table at its start, metrics on a line, what was never right."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import DEVICES, REPO, Cait
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from modules import FIELDS, loader, module, trainer
from starving import Time, train_starving
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from cait.data import loader as loading
from cait.data.datamodule import ImageNetDataModule
from cait.extras import clock
from cait.extras.clock import Clock
from cait.extras.gmacs import ForwardCost, forward_gmacs
from cait.extras.screen.banner import Banner, attention_in_use, schedule_row
from cait.extras.screen.defaults import PLAIN, on_by_default
from cait.extras.screen.doubts import checkpoint_bytes, doubts, shortage
from cait.extras.screen.findings import Findings, findings
from cait.extras.screen.progress import EpochLines, fitting, of_this_epoch, shown_metrics
from cait.extras.screen.summary import never_right
from cait.model.network import create_model
from cait.run.checkpoints import BestCheckpoint
from cait.train.ema import EMA

SHOWN = {"loss": "2.302", "acc1": "10.0%", "lr": "1.0e-05", "val/acc1": "10.00%", "val/f1": "0.1234"}


def test_what_matters_most_stays_on_the_line() -> None:
    def kept(room: int) -> list[str]:
        return list(fitting(SHOWN, room))

    assert kept(200) == list(SHOWN)
    assert kept(60) == ["loss", "acc1", "val/acc1", "val/f1"]
    assert kept(42) == ["loss", "acc1", "val/acc1"]
    assert kept(41) == ["loss", "val/acc1"]
    assert kept(16) == ["val/acc1"]
    assert kept(3) == []


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (dict(lr=0.0), {}, "--model.lr 0 learns nothing"),
        (dict(lr=1e-3, min_lr=0.5), {}, "--model.min_lr 0.5 is above the peak, 0.001"),
        (dict(lr=1e-3, min_lr=0.5, schedule="constant"), {}, None),
        (dict(warmup_epochs=3), {}, "the warm-up takes 18 steps (--model.warmup_epochs 3), the run has 12"),
        ({}, dict(accumulate_grad_batches=7), "--trainer.accumulate_grad_batches 7 is more than the 6 batches"),
        ({}, dict(limit_val_batches=0), "nothing is validated, so there will be no best.ckpt"),
        ({}, dict(check_val_every_n_epoch=3), "--trainer.check_val_every_n_epoch 3 validates never in 2 epochs"),
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


def test_classes_that_are_never_right_are_named() -> None:
    net, batches, run = module(), loader(40), trainer()
    run.validate(net, batches, verbose=False)
    run.datamodule = SimpleNamespace(class_names=list("abcdefg"))
    images, labels = batches.dataset.tensors
    with torch.no_grad():
        logits = net.eval()(images)
    accuracy = MulticlassAccuracy(7, average="none")(logits, labels)
    present = torch.bincount(labels, minlength=7) > 0
    missed = [name for name, *of in zip("abcdefg", accuracy == 0, present, strict=True) if all(of)]
    assert 0 < len(missed) < 7
    words = f"{len(missed)} of 7 classes in the last validation: {', '.join(missed[:5])}"
    assert never_right(run, net).removesuffix(", ...") == words
    net.val_metrics.per_class = torch.tensor([[3, 0]] * 7)
    assert never_right(run, net) == "7 of 7 classes in the last validation: a, b, c, d, e, ..."


def test_classes_that_the_last_validation_never_predicts_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    net = module(lr=1e-3)
    images, labels = torch.randn(140, 3, 8, 8), torch.arange(140) % 7
    validation = DataLoader(TensorDataset(images, labels), batch_size=40)
    trainer(callbacks=[Findings()], max_epochs=2, num_sanity_val_steps=1).fit(net, loader(), validation)
    with torch.no_grad():
        predicted = torch.bincount(net.eval()(images).argmax(dim=1), minlength=7)
    never = [str(label) for label in range(7) if not predicted[label]]
    assert never
    line, *others = capsys.readouterr().out.splitlines()
    assert f"warning: {len(never)} of 7 classes are never predicted in the last validation ({never[0]}" in line
    assert not others


@pytest.mark.parametrize(
    ("trained", "right", "predicted", "words"),
    [
        (97.0, 3, 20, "training is right in 97 % of the images, validation in 15.0 %, no better than chance"),
        (97.0, 6, 20, None),  # 30 % of 140 images in 7 classes is no luck
        (80.0, 3, 20, None),
        (None, 3, 20, None),
        (80.0, 3, 0, "1 of 7 classes are never predicted in the last validation (a): train longer"),
    ],
)
def test_what_a_validation_shows(trained: float | None, right: int, predicted: int, words: str | None) -> None:
    counts = torch.tensor([[20, right]] * 7)
    told = findings(trained, counts, torch.tensor([predicted, *[20] * 6]), list("abcdefg"))
    assert len(told) == (words is not None), told
    assert words is None or told[0].startswith(words)


def data(root: Path, **settings: Any) -> ImageNetDataModule:
    common: dict[str, Any] = dict(root=str(root), img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    return ImageNetDataModule(**(common | settings))


def said(root: Path, folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> list[str]:
    given = data(root, batch_size=64)
    given.announces = False
    folder.mkdir(exist_ok=True)
    callbacks = [clock := Clock(), Banner(given, folder, clock, ForwardCost()), EMA(0.9)]
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


DEFAULTS: dict[str, Any] = {
    "data.repeats": 3,
    "data.auto_augment": "rand-m9-mstd0.5-inc1",
    "data.erase_prob": 0.25,
    "data.mixup": 0.8,
    "data.cutmix": 1.0,
    "model.label_smoothing": 0.1,
    "model.lr_base_size": 512,
}


def test_what_defaults_turn_on_is_named_unless_it_is_given(tmp_path: Path) -> None:
    def on(*arguments: str, **changed: Any) -> str:
        return on_by_default(DEFAULTS | changed, ["fit", *arguments], 6.25e-5, 64)

    end = " (defaults; configs/base.yaml has none of it)"
    every = "3 repeats, RandAugment, erasing 0.25, Mixup, CutMix, label smoothing 0.1, lr 6.25e-05 for 64 images a step"
    assert on() == every + end
    file = tmp_path / "mine.yaml"
    file.write_text("data: {repeats: 3, mixup: 0.8}\n")
    rest = "RandAugment, erasing 0.25, CutMix, label smoothing 0.1, lr 6.25e-05 for 64 images a step"
    assert on("--config", str(file)) == rest + end
    assert on("--config={data: {repeats: 3, mixup: 0.8}}") == rest + end
    assert on("--data.repeats", "3", "--data.mixup=0.8") == rest + end
    assert on("--data", "{repeats: 3, mixup: 0.8}") == rest + end
    assert on(**{"data.auto_augment": "3a", "data.erase_prob": 0.0, "data.repeats": 1}).startswith("3a, Mixup")
    assert on("--config", str(REPO / PLAIN)) == ""


def test_a_run_names_what_its_file_leaves_out(cait: Cait, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "model:\n  name: xxs24\ndata: {root: data/digits, img_size: 16, batch_size: 64}\n"
    )
    fields = "{embed_dim: 16, depth: 1, num_heads: 1, patch_size: 8}"
    few = [*DEVICES, "--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--model.fields", fields]
    done = cait("fit", "--config", "mine.yaml", *few)
    assert done.returncode == 0, done.stderr
    assert "\non        3 repeats, RandAugment, erasing 0.25, Mixup, CutMix, " in done.stdout
    done = cait("fit", "--config", str(REPO / PLAIN), *few)
    assert done.returncode == 0, done.stderr
    assert "\nlength " in done.stdout
    assert "\non  " not in done.stdout


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
    for backend, used in (("recompute", "recompute"), ("reference", "reference")):
        assert attention_in_use(create_model("xxs24", 16, 10, attention_backend=backend, **fields)) == used
    assert attention_in_use(create_model("xxs24", 16, 10, talking_heads=False, **fields)) == ""


def test_a_network_of_ones_own_may_call_a_layer_talking_heads() -> None:
    net = torch.nn.Module()
    net.backend = net.backends = torch.nn.Linear(2, 2)
    assert attention_in_use(net) == ""


def test_the_banner_says_where_the_cooldown_begins(tmp_path: Path) -> None:
    rows: list[str] = []
    steps = LambdaCallback(on_train_start=lambda fit, net: rows.append(schedule_row(net.schedule, fit)))
    for epochs, settings in ((2, {}), (1, dict(schedule="constant")), (2, dict(schedule="wsd", cooldown=1.0))):
        fit = trainer(max_epochs=epochs, callbacks=[steps])
        start = tmp_path / "x.ckpt" if "cooldown" in settings else None
        fit.fit(module(warmup_epochs=0, **settings), loader(), ckpt_path=start)
        fit.save_checkpoint(tmp_path / "x.ckpt")
    expected = "wsd: the peak, and from step 6 to 12 a cooldown to 1e-05"
    assert rows == ["", "constant: the peak to the end", expected]


def test_the_count_for_any_network() -> None:
    net = torch.nn.Conv2d(3, 8, 4, stride=4).train()
    assert forward_gmacs(net, (3, 32, 32)) == pytest.approx(8 * 8 * 8 * 3 * 4 * 4 / 1e9)
    assert net.training
    assert next(net.parameters()).device.type == "cpu"
    assert forward_gmacs(torch.nn.Linear(3, 3), (3, 8, 8)) is None


def test_the_epochs_line_has_the_means_of_the_epoch(capsys) -> None:
    losses: list[float] = []
    steps = LambdaCallback(on_train_batch_end=lambda *args: losses.append(args[2]["loss"].item()))
    callbacks = [steps, clock := Clock(), EpochLines(clock)]
    trainer(max_epochs=2, callbacks=callbacks).fit(module(lr=1e-2, warmup_epochs=0), loader())
    lines = capsys.readouterr().out.splitlines()
    for line, part in zip(lines, (losses[:6], losses[6:]), strict=True):
        assert f"loss: {sum(part) / 6:.3f}  " in line
        assert re.search(r" s, waited \d+\.\d s of \d+\.\d s for images \(\d+%\)$", line)


def test_an_epoch_without_a_validation_shows_none(capsys) -> None:
    bars: list[dict[str, Any]] = []
    measure = Clock()
    bar = LambdaCallback(on_train_batch_end=lambda run, *_: bars.append(shown_metrics(of_this_epoch(run, measure))))
    run = trainer(max_epochs=5, check_val_every_n_epoch=2, callbacks=[measure, bar, EpochLines(measure)])
    run.fit(module(lr=1e-2, per_class=True), loader(), loader(8))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    for name in ("val/acc1: ", "val/acc1_macro: "):
        assert [name in line for line in lines] == [False, True, False, True, False]
    assert "val/acc1" in shown_metrics(run.callback_metrics)  # Lightning keeps it
    assert len(bars) == 30
    assert not [shown for shown in bars if "val/acc1" in shown]


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

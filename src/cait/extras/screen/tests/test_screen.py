"""What a run shows: a table and a warning at its start, and metrics on a line."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SMALL, Cait
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, loader, module, trainer

from cait import create_model
from cait.data import loader as loading
from cait.data.datamodule import ImageNetDataModule
from cait.extras.display import duration, network_name
from cait.extras.screen import progress, tables
from cait.extras.screen.progress import EpochLines
from cait.extras.screen.tables import Banner, RunSummary, forward_gmacs
from cait.model.config import VARIANTS


def said(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    common: dict[str, Any] = dict(img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    given = ImageNetDataModule(str(root), batch_size=64, **common)
    fit = trainer(
        callbacks=[Banner(given, folder)],
        max_epochs=2,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    fit.fit(module(num_classes=10, lr_base_size=512, lr=8e-3), given)
    return capsys.readouterr().out.splitlines()


def test_the_banner_says_what_will_run(
    digits_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(digits_root.parent)
    lines = said(Path(digits_root.name), tmp_path / "mine", capsys)
    net = create_model("xxs24", 8, 10, 0.0, **FIELDS)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    name = network_name("xxs24", FIELDS)
    start = [
        f"model     {name}, {parameters:,} parameters, {forward_gmacs(net, (3, 8, 8)):.3g} GMACs per image",
        "data      digits: 1,437 training and 360 validation images, 10 classes",
        "order     shuffled by seed 0",
    ]
    assert lines[:3] == start
    assert "batch     64 = 1 process × 64 images" in lines
    assert "optimizer adamw, weight decay 0.05" in lines
    assert "length    2 epochs, 44 steps; peak learning rate 0.001 = 0.008 × 64 / 512" in lines
    assert f"device    CPU, 32-true{', recompute attention' if VARIANTS else ''}" in lines
    assert sum("a step: about" in line for line in lines) == 1
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: the warm-up takes 110 steps (--model.warmup_epochs 5), the run has 44: the learning rate only rises"
    ]
    assert len(lines) == 11

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    drawn = said(Path(digits_root.name), tmp_path / "mine", capsys)
    assert "─ training mine ─" in drawn[0]
    assert len(drawn) <= (14 if VARIANTS else 15)  # of a longer name
    assert max(map(len, drawn)) <= 80


def test_a_line_an_epoch_then_the_best_checkpoint_and_what_to_type(
    cait: Cait, tmp_path: Path
) -> None:
    elsewhere = f"--trainer.default_root_dir={tmp_path / 'elsewhere'}"
    done = cait("fit", *SMALL, "--run_name=first", "--trainer.max_epochs=2", elsewhere)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2
    assert all(word in lines[1] for word in ("epoch 2/2", "loss", "lr", "val/acc1"))
    run = tmp_path / "elsewhere/first"
    for words in (f"{run}/checkpoints/best.ckpt", f"cait eval {run}", f"cait resume {run}"):
        assert words in done.stdout


def test_the_count_for_any_network() -> None:
    net = torch.nn.Conv2d(3, 8, 4, stride=4).train()
    assert forward_gmacs(net, (3, 32, 32)) == pytest.approx(8 * 8 * 8 * 3 * 4 * 4 / 1e9)
    assert net.training
    assert next(net.parameters()).device.type == "cpu"
    assert forward_gmacs(torch.nn.Linear(3, 3), (3, 8, 8)) is None
    name, gmacs = ("xxs24", 2.53) if VARIANTS else ("timm/resnet18", 1.82)  # in timm's results
    assert forward_gmacs(create_model(name), (3, 224, 224)) == pytest.approx(gmacs, abs=0.01)


def test_the_epochs_line_has_the_means_of_the_epoch_and_its_own_validation(
    tmp_path: Path, capsys
) -> None:
    losses: list[float] = []
    steps = LambdaCallback(on_train_batch_end=lambda *args: losses.append(args[2]["loss"].item()))
    fit = trainer(
        max_epochs=3,
        check_val_every_n_epoch=2,
        default_root_dir=tmp_path,
        callbacks=[steps, EpochLines()],
    )
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
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now
    for part in (progress, loading):
        monkeypatch.setattr(part, "time", clock)

    class Slow(list):
        def __getitem__(self, index: Any) -> Any:
            clock.now += 3.0
            return super().__getitem__(index)

    def step(*_: Any) -> None:
        clock.now += 1.0

    fit = trainer(max_epochs=2, callbacks=[LambdaCallback(on_train_batch_start=step), EpochLines()])
    fit.fit(module(), loading.Loader(Slow(10 * [next(iter(loader()))]), batch_size=None))
    line = r"^epoch (\d)/2 .* waited (\d+\.\d) s of (\d+\.\d) s for images \((\d+)%\)$"
    found = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert found == [(epoch, "30.0", "40.0", "75") for epoch in ("1", "2")]


def test_the_results_count_the_time_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(tables, "time", clock)
    run: Any = SimpleNamespace(folder=tmp_path, first_step=0)
    first = RunSummary(run)
    clock.now += 60.0
    state = first.state_dict()
    clock.now += 1000.0
    resumed = RunSummary(run)
    resumed.load_state_dict(state)
    clock.now += 60.0
    assert resumed._results(trainer())[0] == ("trained", f"to step 0 in {duration(120.0)}")
    ended, run.first_step = trainer(max_steps=2), 2
    ended.fit(module(), loader())
    assert resumed._results(ended)[0] == ("nothing to do", "the run had ended at step 2")
    ended.fit_loop.epoch_loop.max_steps = 9  # so it was something else
    assert "raise --trainer.max_time" in resumed._results(ended)[0][1]


def test_durations() -> None:
    shown = ["0 s", "1 min 0 s", "2 min 5 s", "3 h 4 min", "9 d 1 h"]
    assert [
        duration(seconds) for seconds in (0.2, 59.6, 125, 3 * 3600 + 240, 9 * 86400 + 3600)
    ] == shown

"""What a run shows: a table and a warning at its start, and metrics on a line."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SMALL
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, images_in, loader, module, trainer

from cait import create_model
from cait.data import loader as loading
from cait.extras.display import network_name
from cait.extras.screen import progress, tables
from cait.extras.screen.progress import EpochLines
from cait.extras.screen.tables import Banner, RunSummary, forward_gmacs
from cait.model.config import VARIANTS


@pytest.fixture
def banner(digits_root, monkeypatch, capsys):
    """The lines of a run called mine, of as many epochs."""
    monkeypatch.chdir(digits_root.parent)

    def lines(epochs):
        data = images_in(
            digits_root.name, img_size=8, batch_size=64, repeats=1, mixup=0.0, cutmix=0.0
        )
        folder = Path("mine")
        fit = trainer(
            callbacks=[Banner(data, folder)],
            max_epochs=epochs,
            limit_val_batches=0,
            default_root_dir=folder,
        )
        fit.fit(module(num_classes=10, lr_base_size=512, lr=8e-3), data)
        return capsys.readouterr().out.splitlines()

    return lines


def test_the_banner_says_what_will_run(banner):
    lines = banner(2)
    net = create_model("xxs24", 8, 10, 0.0, **FIELDS)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    model = f"{network_name('xxs24', FIELDS)}, {parameters:,} parameters"
    gmacs = f"{forward_gmacs(net, (3, 8, 8)):.3g} GMACs per image"
    attention = ", recompute attention" if VARIANTS else ""
    assert lines[:3] == [
        f"model     {model}, {gmacs}",
        "data      digits: 1,437 training and 360 validation images, 10 classes",
        "order     shuffled by seed 0",
    ]
    assert "batch     64 = 1 process × 64 images" in lines
    assert "optimizer adamw, weight decay 0.05" in lines
    assert "length    2 epochs, 44 steps; peak learning rate 0.001 = 0.008 × 64 / 512" in lines
    assert f"device    CPU, 32-true{attention}" in lines
    warning = (
        "warning: the warm-up takes 110 steps (--model.warmup_epochs 5), "
        "the run has 44: the learning rate only rises"
    )
    assert warning in lines
    [estimate] = [line for line in lines if "a step: about" in line]
    assert "to go, and validation" in estimate
    assert len(lines) == 11


def test_on_a_terminal_it_has_a_frame(banner, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    lines = banner(1)
    assert "─ training mine ─" in lines[0]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80


def test_a_line_an_epoch_then_the_best_checkpoint_and_what_to_type(cait, tmp_path):
    root = tmp_path / "elsewhere"
    words = ["--run_name=first", "--trainer.max_epochs=2", "--trainer.limit_train_batches=6"]
    done = cait("fit", *SMALL, *words, f"--trainer.default_root_dir={root}")
    assert done.returncode == 0, done.stderr
    _, last = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    for word in ("epoch 2/2", "loss", "lr", "val/acc1"):
        assert word in last
    run = root / "first"
    for words in (f"{run}/checkpoints/best.ckpt", f"cait eval {run}", f"cait resume {run}"):
        assert words in done.stdout


def test_the_multiply_adds_of_a_layer():
    net = torch.nn.Conv2d(3, 8, 4, stride=4).train()
    assert forward_gmacs(net, (3, 32, 32)) == pytest.approx(8 * 8 * 8 * 3 * 4 * 4 / 1e9)
    assert net.training
    assert next(net.parameters()).device.type == "cpu"


def test_the_multiply_adds_of_a_network_are_those_of_timms_results():
    name, gmacs = ("xxs24", 2.53) if VARIANTS else ("timm/resnet18", 1.82)
    assert forward_gmacs(create_model(name), (3, 224, 224)) == pytest.approx(gmacs, abs=0.01)


def test_a_network_that_does_not_run_has_none():
    assert forward_gmacs(torch.nn.Linear(3, 3), (3, 8, 8)) is None


def test_the_epochs_line_has_the_means_of_the_epoch_and_its_own_validation(tmp_path, capsys):
    losses: list[float] = []

    def note(fit, net, outputs, *_):
        losses.append(float(outputs["loss"]))

    fit = trainer(
        max_epochs=3,
        check_val_every_n_epoch=2,
        default_root_dir=tmp_path,
        callbacks=[LambdaCallback(on_train_batch_end=note), EpochLines()],
    )
    fit.fit(module(lr=1e-2, warmup_epochs=0, per_class=True), loader(), loader(8))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    for epoch, line in enumerate(lines):
        mean = sum(losses[6 * epoch : 6 * epoch + 6]) / 6
        assert f"loss: {mean:.3f}  " in line
        for name in ("val/acc1: ", "val/acc1_macro: "):
            assert (name in line) is (epoch == 1)
    assert len(lines) == 3


class Clock:
    """The time of this test."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for part in (progress, tables, loading):
        monkeypatch.setattr(part, "time", clock)
    return clock


def test_the_epochs_line_says_how_long_its_steps_waited(clock, capsys):
    class Slow(list):
        def __getitem__(self, index: Any) -> Any:
            clock.now += 3.0
            return super().__getitem__(index)

    def step(*_):
        clock.now += 1.0

    batches = Slow(10 * [next(iter(loader()))])
    fit = trainer(max_epochs=2, callbacks=[LambdaCallback(on_train_batch_start=step), EpochLines()])
    fit.fit(module(), loading.Loader(batches, batch_size=None))
    line = r"^epoch (\d)/2 .*, waited 30\.0 s of 40\.0 s for images \(75%\)$"
    assert re.findall(line, capsys.readouterr().out, re.MULTILINE) == ["1", "2"]


@pytest.fixture
def resumed(clock, tmp_path):
    """The summary of a run that trained for a minute, lay still, and has trained for another."""
    run: Any = SimpleNamespace(folder=tmp_path, first_step=0)
    first = RunSummary(run)
    clock.now += 60.0
    state = first.state_dict()
    clock.now += 1000.0
    summary = RunSummary(run)
    summary.load_state_dict(state)
    clock.now += 60.0
    return summary


def test_the_results_count_the_time_of_the_whole_run(resumed):
    assert resumed._results(trainer())[0] == ("trained", "to step 0 in 2 min 0 s")


def test_the_results_say_why_nothing_was_trained(resumed):
    fit = trainer(max_steps=2)
    resumed.run.first_step = 2
    fit.fit(module(), loader())
    assert resumed._results(fit)[0] == ("nothing to do", "the run had ended at step 2")
    fit.fit_loop.epoch_loop.max_steps = 9  # so it was something else
    assert "raise --trainer.max_time" in resumed._results(fit)[0][1]

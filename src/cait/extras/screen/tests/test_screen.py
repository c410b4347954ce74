"""What a run shows: a table and a warning at its start, and metrics on a line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from modules import images_in, loader, module, train, trainer

from cait.data import loader as loading
from cait.extras.screen import progress, tables
from cait.extras.screen.progress import EpochLines
from cait.extras.screen.tables import Banner, RunSummary


def test_on_a_terminal_the_banner_has_a_frame(digits_root, monkeypatch, capsys):
    monkeypatch.chdir(digits_root.parent)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    data = images_in(digits_root.name, img_size=8, batch_size=64, repeats=1, mixup=0.0, cutmix=0.0)
    train(module(num_classes=10), images=data, callbacks=[Banner(data, Path("mine"))])
    lines = capsys.readouterr().out.splitlines()
    assert "─ training mine ─" in lines[0]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80


def test_the_epochs_line_has_the_means_of_the_epoch_and_its_own_validation(capsys):
    losses = []

    def note(fit, net, outputs, *_):
        losses.append(float(outputs["loss"]))

    callbacks = [LambdaCallback(on_train_batch_end=note), EpochLines()]
    net = module(lr=1e-2, warmup_epochs=0, per_class=True)
    train(net, callbacks=callbacks, max_epochs=3, check_val_every_n_epoch=2)
    lines = re.findall("^epoch .*", capsys.readouterr().out, re.M)
    assert ["val/acc1: " in line for line in lines] == [False, True, False]
    assert ["val/acc1_macro: " in line for line in lines] == [False, True, False]
    for epoch, line in enumerate(lines):
        mean = sum(losses[6 * epoch : 6 * epoch + 6]) / 6
        assert f"loss: {mean:.3f}  " in line


class Clock:
    """The time of this test."""

    now = 0.0

    def monotonic(self):
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
        def __getitem__(self, index):
            clock.now += 3.0
            return super().__getitem__(index)

    def step(*_):
        clock.now += 1.0

    batches = Slow(10 * [next(iter(loader()))])
    fit = trainer(max_epochs=2, callbacks=[LambdaCallback(on_train_batch_start=step), EpochLines()])
    fit.fit(module(), loading.Loader(batches, batch_size=None))
    line = r"^epoch (\d)/2 .*, waited 30\.0 s of 40\.0 s for images \(75%\)$"
    assert re.findall(line, capsys.readouterr().out, re.MULTILINE) == ["1", "2"]


def test_the_results_count_the_time_of_the_whole_run(clock, tmp_path):
    """One that has trained for a minute, lain still, and trained for another."""
    run = SimpleNamespace(folder=tmp_path, first_step=0)
    first = RunSummary(run)
    clock.now += 60.0
    state = first.state_dict()
    clock.now += 1000.0
    resumed = RunSummary(run)
    resumed.load_state_dict(state)
    clock.now += 60.0
    assert resumed._results(trainer())[0] == ("trained", "to step 0 in 2 min 0 s")

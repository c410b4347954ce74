"""What a run shows: the time left, warnings at its start, the summary at its end, its help."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import DEVICES, REPO
from lightning.pytorch import Callback
from modules import loader, module, trainer
from torchmetrics.classification import MulticlassAccuracy

from cait.cli import help, main
from cait.cli.lightning import CaiTCLI
from cait.guards.doubts import doubts
from cait.run import clock, rundir
from cait.run.clock import Clock, countdown
from cait.run.program import Program
from cait.run.progress import fitting
from cait.run.summary import never_right

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


def test_the_time_left_counts_steps_and_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of three steps of two batches, 2 s each, and a validation of 10 s after each."""

    class Time(Callback):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def on_train_batch_start(self, *_: Any) -> None:
            self.now += 2

        def on_validation_batch_start(self, *_: Any) -> None:
            self.now += 5

    told = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            told.append(Clock.of(trainer).left(trainer))

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                told.append(("validated", Clock.of(trainer).left(trainer)))

    time = Time()
    monkeypatch.setattr(clock, "time", time)
    fit = trainer(callbacks=[time, Clock(), Spy()], accumulate_grad_batches=2, num_sanity_val_steps=1)
    fit.fit(module(), loader(24, 4), loader(8, 4))
    first = [None, 10 * 2, 10 * 2, 8 * 2, 8 * 2, 6 * 2, ("validated", 6 * 2 + 10)]  # no validation is known yet
    second = [6 * 2 + 10, 4 * 2 + 10, 4 * 2 + 10, 2 * 2 + 10, 2 * 2 + 10, 0, ("validated", 0)]
    assert told == first + second
    assert [countdown(seconds) for seconds in (5, 3599.6, 130 * 3600)] == ["0:00:05", "1:00:00", "130:00:00"]


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (dict(lr=0.0), {}, "--model.lr 0 learns nothing"),
        (dict(lr=1e-3, min_lr=0.5), {}, "--model.min_lr 0.5 is above the peak, 0.001"),
        (dict(warmup_epochs=3), {}, "the warm-up takes 18 steps (--model.warmup_epochs 3), the run has 12"),
        ({}, dict(accumulate_grad_batches=7), "--trainer.accumulate_grad_batches 7 is more than the 6 batches"),
        ({}, dict(limit_val_batches=0), "nothing is validated, so there will be no best.ckpt"),
        ({}, dict(check_val_every_n_epoch=3), "--trainer.check_val_every_n_epoch 3 validates never in 2 epochs"),
        ({}, {}, None),
    ],
)
def test_senseless_settings_are_doubted(settings: dict, given: dict, words: str | None) -> None:
    told: list[str] = []

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            told.extend(doubts(trainer, pl_module, saves_best=True))
            trainer.should_stop = True

    recipe = dict(warmup_epochs=0.5) | settings
    trainer(callbacks=[Spy()], **given).fit(module(**recipe), loader(), loader(8))
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


def test_the_short_help_says_what_the_parser_says(capsys: pytest.CaptureFixture[str]) -> None:
    class Known(CaiTCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            known.update(self._parser("fit").get_defaults().as_flat().__dict__)
            raise SystemExit

    known: dict[str, Any] = {}
    with pytest.raises(SystemExit):
        Known(["fit"], Program())
    text = " ".join(help.fit().split("\n\n", 2)[2].split())
    named = re.findall(r" --([\w.]+) ((?:(?! --).)*?)\[([^\[\]]*)\]", text)
    assert {name for name, *_ in named} == {name for names in help.SHOWN.values() for name in names.split()}
    for name, _, default in named:
        shown = default if default != "null" else "None"
        assert name == "model.fields" or str(known[name]).lower() in (shown.lower(), f"{shown}.0"), name
    assert max(map(len, help.fit().splitlines())) <= 80
    main(["fit", "--help=model"])
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 100
    for words in ("  depth: int [24]\n      Number of self-attention blocks.", "layer_scale_init: float | null [null]"):
        assert words in listed


def test_a_failed_start_leaves_nothing(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    small = ["--model.fields.embed_dim=32", "--model.fields.depth=1", "--trainer.max_steps=2", "--data.num_workers=0"]
    fit = ["fit", f"--config={REPO / 'configs/digits.yaml'}", *DEVICES[:1], *small, f"--data.root={digits_root}"]

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        assert stop.value.code == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    def files() -> list[Path]:
        return sorted(tmp_path.rglob("*"))

    assert "do not fill one batch of 100000" in refused(*fit, "--data.batch_size=100000")
    assert "nowhere.pth do not exist" in refused(*fit, "--run_name=b", "--model.weights=nowhere.pth")
    assert "`val_check_interval` (99999) must be less" in refused(*fit, "--trainer.val_check_interval=99999")
    assert files() == [tmp_path / "logs"]
    (tmp_path / "logs/a").mkdir()
    (tmp_path / "logs/a/notes.txt").touch()
    assert "class_names has 2 names" in refused(*fit, "--run_name=a", "--data.class_names=[a,b]")
    assert [path.name for path in (tmp_path / "logs/a").iterdir() if path.suffix] == ["notes.txt"]

    main([*fit, "--run_name=done"])
    assert "see its mistakes" in capfd.readouterr().out
    assert (tmp_path / "logs/done" / rundir.FINISHED).exists()
    before = files()
    assert "has done 2 already; give more" in refused("resume", "done", "--trainer.max_steps=1")
    assert "seed was 0, is 5" in refused("resume", "done", "--trainer.max_steps=3", "--seed_everything=5")
    assert files() == before

"""An error in the user's own code keeps its traceback, and ends with a line that names the user's file and line."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import SMALL, slow
from lightning.pytorch import seed_everything
from modules import images_in, loader, module, trainer
from PIL import Image
from torch import nn

from cait.cli import main
from cait.data.dataset import MapSamples
from cait.data.reading import UnreadableImageError
from cait.model import network

MINE = """
import os
import numpy as np
import torch
from lightning.pytorch import Callback
from PIL import Image
from torch import nn
from torchmetrics import Metric

class Odd(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)

ERRORS = {
    "key": lambda: {}["missing"],
    "odd": lambda: (_ for _ in ()).throw(Odd(1, "two")),
    "plain": lambda: (_ for _ in ()).throw(AssertionError()),
    "file": lambda: open("nowhere.txt"),
    "compiled": lambda: np.random.randint(2, 1),
    "lines": lambda: (_ for _ in ()).throw(ValueError("first: one\\nsecond: \\x1b[31mtwo")),
}

def fail(part):
    if os.environ["PART"] == part:
        ERRORS[os.environ["ERROR"]]()

class Net(nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        fail("network")
        self.head = nn.Linear(3 * img_size**2, num_classes)
    def forward(self, x):
        if self.training:
            fail("forward")
        return self.head(x.flatten(1))

def loss():
    def call(logits, targets):
        fail("loss")
        return logits.mean()
    return call

def nan():
    def call(logits, targets):
        zero = 0 * logits  # to which the root below sends a gradient of infinity
        return zero.mean().sqrt()
    return call

class Mine(Metric):
    def __init__(self, num_classes):
        super().__init__()
    def update(self, logits, labels):
        fail("metric")
    def compute(self):
        return torch.ones(())

class Call(Callback):
    def __init__(self):
        fail("callback")
    def on_train_batch_end(self, trainer, *_):
        fail("hook")
        if trainer.global_step == 2:
            fail("hook after a save")

class Data:
    classes = ("a", "b")
    def __init__(self, split):
        pass
    def __len__(self):
        return 300
    def __getitem__(self, index):
        fail("image")
        return Image.new("RGB", (16, 16), (index % 255, 0, 0)), index % 2

def operation(image):
    fail("augmentation")
    return image
"""
LINES = {
    name: n
    for n, line in enumerate(MINE.splitlines(), 1)
    for name in re.findall(r'^    "(\w+)": lambda', line)
}
WORDS = {
    "key": "KeyError: 'missing'",
    "odd": "(1, 'two')",
    "plain": "AssertionError",
    "file": "nowhere.txt",
    "compiled": "low >= high",
    "lines": "first: one second: \N{REPLACEMENT CHARACTER}[31mtwo",
}
NET = ["--model.name=mine:Net", "--model.fields=null", "--model.drop_path_rate=null"]
DATA = ["--data.root=mine:Data", "--model.lr_base_size=null"]
CALLBACK = ["--trainer.callbacks+=mine.Call"]
ROWS = [
    *(("forward", name, NET) for name in WORDS),
    ("network", "compiled", NET),
    ("loss", "plain", ["--model.loss=mine:loss"]),
    ("metric", "odd", ["--model.metrics={x: mine:Mine}", "--best_metric=val/loss"]),
    ("callback", "compiled", CALLBACK),
    ("hook", "key", CALLBACK),
    ("image", "compiled", DATA),
    ("augmentation", "file", ["--data.augment_ops=[mine:operation]"]),
]
IN_WORKERS = [("image", "compiled", DATA), *slow(("image", "key", DATA), ("image", "odd", DATA))]

Run = Callable[..., str]


@pytest.fixture
def run(
    tmp_path: Path,
    digits_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """What `cait fit` of two steps in this process, which is to fail, writes to standard error."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("CAIT_RUN", "")
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(part: str, error: str, *arguments: str) -> str:
        monkeypatch.setenv("PART", part)
        monkeypatch.setenv("ERROR", error)
        place = [
            f"--data.root={digits_root}",
            "--data.num_workers=0",
            "--run_name=mine",
            "--trainer.max_steps=2",
        ]
        with pytest.raises(SystemExit) as stop:
            main(["fit", *SMALL, *place, *arguments])
        assert stop.value.code == 2  # a scheduler does not try it again
        return capfd.readouterr().err

    return run


@pytest.mark.parametrize(("part", "error", "arguments"), [*ROWS[::2], *slow(*ROWS[1::2])])
def test_the_traceback_stays_and_the_last_line_names_the_users_line(
    part: str, error: str, arguments: list[str], run: Run
) -> None:
    shown = run(part, error, *arguments)
    *_, last = shown.splitlines()
    assert shown.count("cait: error: ") == 1
    assert "Traceback (most recent call last):" in shown
    assert f'mine.py", line {LINES[error]}, in ' in shown
    assert last.startswith("cait: error: ")
    assert WORDS[error] in last
    assert f"(mine.py:{LINES[error]})" in last
    assert "\x1b[31m" not in shown


@pytest.mark.parametrize(("part", "error", "arguments"), IN_WORKERS)
def test_of_a_loaders_process_the_traceback_is_shown_as_torch_gives_it(
    part: str, error: str, arguments: list[str], run: Run
) -> None:
    shown = run(part, error, *arguments, "--data.num_workers=1")
    assert f'mine.py", line {LINES[error]}, in ' in shown
    assert WORDS[error] in shown.splitlines()[-1]


def test_the_line_that_made_a_nan_is_named(run: Run) -> None:
    """Torch raises in the backward pass, where no frame is the user's."""
    shown = run("", "", "--model.loss=mine:nan", "--trainer.detect_anomaly=true")
    line = next(n for n, text in enumerate(MINE.splitlines(), 1) if "zero = 0" in text)
    assert f"(mine.py:{line})" in shown.splitlines()[-1]


def test_the_last_line_says_how_to_continue(run: Run) -> None:
    shown = run(
        "hook after a save", "key", *CALLBACK, "--save_every_n_steps=1", "--trainer.max_steps=3"
    )
    assert shown.splitlines()[-1].endswith(
        f"(mine.py:{LINES['key']}); to continue: cait resume mine"
    )


def test_a_fault_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cait.plugins.Verb.load", lambda _: lambda *_: {}["missing"])
    monkeypatch.setattr("cait.errors.is_own", lambda path: False)  # this file
    with pytest.raises(SystemExit) as stop:
        main(["eval"])
    assert stop.value.code == 1
    assert capfd.readouterr().err.splitlines()[-2:] == [
        "KeyError: 'missing'",
        "cait: error: KeyError: 'missing'",
    ]


def test_a_file_that_ends_the_process_is_named(run: Run, tmp_path: Path) -> None:
    """Such as a script that reads its command line when it is imported."""
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    last = run("", "", "--model.loss=script:loss").splitlines()[-1]
    assert "cait: error: script.py:2 has ended the run, by sys.exit" in last


def broken_png(place: Path) -> Path:
    Image.effect_noise((64, 64), 50).save(place / "whole.png")
    data = bytearray((place / "whole.png").read_bytes())
    data[60:64] = b"\0\0\0\0"  # within the compressed pixels
    (place / "broken.png").write_bytes(data[: len(data) // 2])
    return place / "broken.png"


@pytest.mark.parametrize(
    ("give", "is_image"),
    [
        (lambda path: Image.open(path).convert("RGB"), True),
        (lambda path: Image.open(__file__), True),
        (lambda path: Path("nowhere").read_bytes(), True),
        (lambda path: Image.new("RGB", (1, 1)).resize((0, 0)), False),
        (lambda path: Image.fromarray(None), False),
        (lambda path: {}["missing"], False),
        (lambda path: [][3], False),
        (lambda path: len(3), False),
    ],
)
def test_only_what_says_that_an_image_cannot_be_read_is_an_unreadable_image(
    give: Callable[[Path], object], is_image: bool, tmp_path: Path
) -> None:
    path = broken_png(tmp_path)

    class Data:
        def __getitem__(self, index: int) -> object:
            return give(path), 0

    with pytest.raises(Exception) as raised:  # noqa: PT011
        MapSamples("mine", "train", Data(), ["a", "b"])[0]
    assert isinstance(raised.value, UnreadableImageError) is is_image


class PartlyFrozen(nn.Module):
    def __init__(self, img_size: int = 8, num_classes: int = 7) -> None:
        super().__init__()
        self.body, self.head = nn.BatchNorm2d(3).eval(), nn.Linear(3 * img_size**2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).flatten(1))


def test_what_the_constructor_put_into_evaluation_stays_there() -> None:
    own = module(name=f"{__name__}:PartlyFrozen", fields=None)
    statistics = own.model.body.running_mean.clone()
    trainer(max_epochs=1).fit(own, loader(), loader())
    own.class_names, own.preprocessing = [*"abcdefg"], {"img_size": 8}
    own.predict(Image.new("RGB", (8, 8)))
    assert (own.training, own.model.head.training, own.model.body.training) == (True, True, False)
    assert torch.equal(own.model.body.running_mean, statistics)
    with network.in_evaluation(own):
        assert not own.model.head.training


def test_a_module_is_validated_and_then_trained(digits_root: Path) -> None:
    seed_everything(0)
    metrics = {"f1": "torchmetrics.classification:MulticlassF1Score"}
    own = module(num_classes=None, img_size=None, metrics=metrics)
    data = images_in(digits_root, img_size=16, batch_size=64)
    fit = trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    [before] = fit.validate(own, datamodule=data, verbose=False)
    fit.fit(own, datamodule=data)
    [after] = fit.validate(own, datamodule=data, verbose=False)
    assert before.keys() == after.keys()
    assert before != after


@pytest.mark.parametrize("kind", ["gif", "tiff", "png"])
def test_an_image_that_the_caller_opened_stays_open(kind: str, tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 200)]
    frames[0].save(tmp_path / f"x.{kind}", save_all=True, append_images=frames[1:])
    own = module()
    own.class_names, own.preprocessing = [*"abcdefg"], {"img_size": 8}
    with Image.open(tmp_path / f"x.{kind}") as image:
        own.predict([image, image])
        image.seek(1)
        image.load()

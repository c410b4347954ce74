"""An error in the user's own code keeps its traceback, and ends with a line that names the user's file and line."""

import shlex
from pathlib import Path

import pytest
import torch
from harness import SMALL, beside, over_table, slow
from lightning.pytorch import seed_everything
from modules import images_in, loader, module, trainer
from PIL import Image
from torch import nn

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
WORDS = beside(__file__)["words"]
"""What the last line says of each error."""
DATA = "--data.root=mine:Data --model.lr_base_size=null"
CALLBACK = "--trainer.callbacks+=mine.Call"


def line_of(text):
    """The line of the user's file that has this text."""
    [number] = [number for number, line in enumerate(MINE.splitlines(), 1) if text in line]
    return number


@pytest.fixture
def fit(cait, tmp_path, monkeypatch):
    """What `cait fit` of two steps, which is to fail, writes to standard error."""
    (tmp_path / "mine.py").write_text(MINE)

    def fit(part, error, words):
        monkeypatch.setenv("PART", part)
        monkeypatch.setenv("ERROR", error)
        brief = ["--data.num_workers=0", "--run_name=mine", "--trainer.max_steps=2"]
        done = cait("fit", *SMALL, *brief, *shlex.split(words))
        assert done.returncode == 2  # a scheduler does not try it again
        return done.stderr

    return fit


@over_table(__file__, "mistakes")
def test_the_traceback_stays_and_the_last_line_names_the_users_line(part, error, words, fit):
    shown = fit(part, error, words)
    line = line_of(f'"{error}": lambda')
    last = shown.splitlines()[-1]
    assert shown.count("cait: error: ") == 1
    assert "Traceback (most recent call last):" in shown
    assert f'mine.py", line {line}, in ' in shown
    assert last.startswith("cait: error: ")
    assert WORDS[error] in last
    assert f"(mine.py:{line})" in last
    assert "\x1b[31m" not in shown


@pytest.mark.parametrize("error", ["compiled", *slow("key", "odd")])
def test_of_a_loaders_process_the_traceback_is_shown_as_torch_gives_it(error, fit):
    shown = fit("image", error, f"{DATA} --data.num_workers=1")
    line = line_of(f'"{error}": lambda')
    assert f'mine.py", line {line}, in ' in shown
    assert WORDS[error] in shown.splitlines()[-1]


def test_the_line_that_made_a_nan_is_named(fit, recwarn):
    """Torch raises in the backward pass, where no frame is the user's, and warns of the line in the forward pass."""
    shown = fit("", "", "--model.loss=mine:nan --trainer.detect_anomaly=true")
    assert f"(mine.py:{line_of('zero = 0')})" in shown.splitlines()[-1]


def test_the_last_line_says_how_to_continue(fit):
    words = f"{CALLBACK} --save_every_n_steps=1 --trainer.max_steps=3"
    shown = fit("hook after a save", "key", words)
    line = line_of('"key": lambda')
    assert shown.endswith(f"(mine.py:{line}); to continue: cait resume mine\n")


def test_a_file_that_ends_the_process_is_named(fit, tmp_path):
    """Such as a script that reads its command line when it is imported."""
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    shown = fit("", "", "--model.loss=script:loss")
    assert shown.splitlines()[-1].startswith("cait: error: script.py:2 has ended the run")


def test_a_fault_of_ours_keeps_its_traceback(cait, monkeypatch):
    monkeypatch.setattr("cait.plugins.Verb.load", lambda _: lambda *_: {}["missing"])
    monkeypatch.setattr("cait.errors.is_own", lambda path: False)  # this file
    done = cait("eval")
    assert done.returncode == 1
    assert "Traceback (most recent call last):" in done.stderr
    assert done.stderr.endswith("\nKeyError: 'missing'\ncait: error: KeyError: 'missing'\n")


@over_table(__file__, "readings")
def test_only_what_says_that_an_image_cannot_be_read_is_an_unreadable_image(
    case, unreadable, tmp_path, monkeypatch
):
    class Data:
        def __getitem__(self, index):
            return eval(case), 0

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Image.effect_noise((64, 64), 50).save("whole.png")
    Path("cut.png").write_bytes(Path("whole.png").read_bytes()[:2000])
    with pytest.raises(Exception) as raised:  # noqa: PT011
        MapSamples("mine", "train", Data(), ["a", "b"])[0]
    assert isinstance(raised.value, UnreadableImageError) is unreadable


class PartlyFrozen(nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.body = nn.BatchNorm2d(3).eval()
        self.head = nn.Linear(3 * img_size**2, num_classes)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


def test_what_the_constructor_put_into_evaluation_stays_there():
    own = module(name=f"{__name__}:PartlyFrozen", fields=None)
    statistics = own.model.body.running_mean.clone()
    trainer(max_epochs=1).fit(own, loader(), loader())
    assert own.model.head.training
    assert not own.model.body.training
    assert torch.equal(own.model.body.running_mean, statistics)
    with network.in_evaluation(own):
        assert not own.model.head.training
    assert own.training
    assert own.model.head.training
    assert not own.model.body.training


def test_a_module_is_validated_and_then_trained(digits_root):
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


@pytest.mark.parametrize("suffix", ["gif", "tiff", "png"])
def test_an_image_that_the_caller_opened_stays_open(suffix, tmp_path):
    file = tmp_path / f"x.{suffix}"
    second = Image.new("L", (8, 8), 200)
    Image.new("L", (8, 8)).save(file, save_all=True, append_images=[second])
    own = module()
    own.class_names = [*"abcdefg"]
    own.preprocessing = {"img_size": 8}
    with Image.open(file) as image:
        own.predict([image, image])
        image.seek(1)
        image.load()

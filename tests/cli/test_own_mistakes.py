"""An error in a part of the user's own names the innermost line of the user's file, whatever the part and the error."""

import itertools
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
import os, time
import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from PIL import Image
from torch import nn
from torchmetrics import Metric
from cait import CaiTModule, ImageNetDataModule

class Odd(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)

KINDS = {
    "key": lambda: {}["missing"],
    "torch": lambda: nn.functional.linear(torch.ones(2, 3), torch.ones(2, 2)),
    "odd": lambda: (_ for _ in ()).throw(Odd(1, "two")),
    "plain": lambda: (_ for _ in ()).throw(AssertionError()),
    "file": lambda: open("nowhere.txt"),
    "compiled": lambda: np.random.randint(2, 1),
    "lines": lambda: (_ for _ in ()).throw(ValueError("first: one\\nsecond: two")),
}

def fail(part):
    if os.environ["PART"] == part:
        KINDS[os.environ["KIND"]]()

class Net(nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        fail("network")
        self.head = nn.Linear(3 * img_size**2, num_classes)
    def forward(self, x):
        fail("forward")
        if self.training:
            fail("forward in training")
        return self.head(x.flatten(1))

def loss():
    fail("loss")
    def call(logits, targets):
        fail("loss called")
        return logits.mean()
    return call

class Mine(Metric):
    higher_is_better = True
    def __init__(self, num_classes):
        super().__init__()
        fail("metric")
    def update(self, logits, labels):
        fail("metric updated")
    def compute(self):
        fail("metric computed")
        return torch.ones(())

class Call(Callback):
    def __init__(self, place: str = "x"):
        fail("callback")
    def on_train_batch_end(self, *_):
        fail("callback called")
    def on_save_checkpoint(self, *_):
        fail("callback that saves")

class Log(Logger):
    name, version = "mine", 0
    def log_hyperparams(self, *_):
        pass
    def log_metrics(self, metrics, step=None):
        fail("logger")

class Data:
    classes = ("a", "b")
    def __init__(self, split):
        fail("data set")
    def __len__(self):
        return 300
    def __getitem__(self, index):
        fail("image")
        return Image.new("RGB", (16, 16), (index % 255, 0, 0)), index % 2

def operation(image):
    fail("augmentation")
    return image

class Step(torch.optim.SGD):
    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        fail("optimizer")
    def step(self, closure=None):
        fail("step")
        return super().step(closure)

class Module(CaiTModule):
    def configure_optimizers(self):
        fail("schedule")
        return super().configure_optimizers()

class Images(ImageNetDataModule):
    def make_eval_transform(self):
        fail("transform")
        return super().make_eval_transform()
"""
LINES = {name: n for n, line in enumerate(MINE.splitlines(), 1) for name in re.findall(r'^    "(\w+)": lambda', line)}
SAID = {
    "key": "KeyError",
    "torch": "mat1 and mat2 shapes cannot be multiplied",
    "odd": "(1, 'two')",
    "plain": "AssertionError",
    "file": "nowhere.txt",
    "compiled": "low >= high",
    "lines": "first: one second: two",
}
NET = ["--model.name=mine:Net", "--model.fields=null", "--model.drop_path_rate=null"]
OWN = ["--data.root=mine:Data", "--model.lr_base_size=null"]
WORKERS = [*OWN, "--data.num_workers=2"]
PARTS = {
    "network": NET,
    "forward": NET,
    "forward in training": NET,
    "loss": ["--model.loss=mine:loss"],
    "loss called": ["--model.loss=mine:loss"],
    "metric": ["--model.metrics={x: mine:Mine}"],
    "metric updated": ["--model.metrics={x: mine:Mine}"],
    "metric computed": ["--model.metrics={x: mine:Mine}"],
    "callback": ["--trainer.callbacks+=mine.Call"],
    "callback called": ["--trainer.callbacks+=mine.Call"],
    "callback that saves": ["--trainer.callbacks+=mine.Call"],
    "logger": ["--trainer.logger=mine.Log"],
    "data set": OWN,
    "image": OWN,
    "image in a worker": WORKERS,
    "augmentation": ["--data.augment_ops=[mine:operation]"],
    "augmentation in a worker": ["--data.augment_ops=[mine:operation]", "--data.num_workers=1"],
    "optimizer": ["--model.optimizer=mine:Step"],
    "step": ["--model.optimizer=mine:Step"],
    "schedule": [],
    "transform": [],
}
PAIRS = [*zip(PARTS, itertools.cycle(SAID)), *(("forward in training", kind) for kind in SAID)]
PAIRS = sorted({*PAIRS} - {("image", "file"), ("image in a worker", "file")})  # that is an unreadable image


Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`cait fit` of two steps in this process that is to fail; the lines of its standard error."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("CAIT_RUN", "")
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(*arguments: str) -> list[str]:
        import mine

        place = [f"--data.root={digits_root}", "--data.num_workers=0", "--run_name=mine", "--trainer.max_steps=2"]
        with pytest.raises(SystemExit) as stop:
            main(["fit", *SMALL, *place, *arguments], module=mine.Module, data=mine.Images)
        assert stop.value.code == 2
        return capfd.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(("part", "kind"), [*PAIRS[::3], *slow(*PAIRS[1::3], *PAIRS[2::3])])
def test_the_line_of_the_users_file_is_named(part: str, kind: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PART", part.removesuffix(" in a worker"))
    monkeypatch.setenv("KIND", kind)
    [told] = [line for line in run(*PARTS[part]) if line.startswith(("cait: error", "Traceback"))]
    assert SAID[kind] in told
    assert f"mine.py:{LINES[kind]})" in told
    assert "; CAIT_TRACEBACK=1 shows all of it" in told
    assert ("the augmentation mine:operation fails" in told) is part.startswith("augmentation")


def test_all_of_it_is_shown_on_demand(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PART": "forward in training", "KIND": "torch", "CAIT_TRACEBACK": "1"}.items():
        monkeypatch.setenv(name, value)
    told = "\n".join(run(*NET))
    assert "Traceback (most recent call last):" in told
    assert "in training_step" in told


def test_a_file_that_ends_the_process_is_named(run: Run, tmp_path: Path) -> None:
    """Such as a script that reads its command line when it is imported."""
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert "cait: error: script.py:2 has ended the run, by sys.exit" in run("--model.loss=script:loss")[-1]


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
    own, data = module(num_classes=None, img_size=None), images_in(digits_root, img_size=16, batch_size=64)
    own.own_metrics = {"f1": "torchmetrics.classification:MulticlassF1Score"}
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

"""`cait replay`: the pixels of a past step are those that training saw, its loss and gradients those of metrics.csv."""

import csv
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL, call, checkpoint, ended, python, rows, slow, start
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from modules import module, trainer
from PIL import Image
from runs import TWO, wait_for_steps
from torchvision import transforms

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from contrib.replay import contact_sheet
from contrib.replay.contact_sheet import Cell
from contrib.replay.step_record import StepRecord
from contrib.replay.training_batches import TrainingBatches

SETTINGS: dict[str, Any] = dict(
    img_size=8,
    batch_size=6,
    num_workers=0,
    repeats=3,
    erase_prob=0.7,
    mix_prob=0.8,
    auto_augment="rand-m9-mstd0.5-inc1",
    max_bad_share=0.5,
    seed=3,
)
NO_MIXING: dict[str, Any] = dict(mixup=0.0, cutmix=0.0)


class Capture(Callback):
    """Copies of the batches that training gets, by (epoch, batch)."""

    def __init__(self):
        self.batches: dict[tuple[int, int], list[torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, net: Any, batch: Any, number: int):
        self.batches[trainer.current_epoch, number] = [tensor.clone() for tensor in batch]


class OwnTransform(ImageNetDataModule):
    """Float images from a transform that draws from torch's generator."""

    def make_train_transform(self) -> Any:
        resize = transforms.RandomResizedCrop(self.img_size)
        normalize = transforms.Normalize([0.5] * 3, [0.5] * 3)
        return transforms.Compose([resize, transforms.ToTensor(), normalize])


class Noise(ImageNetDataModule):
    """Noise on the device, from each generator."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = random.random() + np.random.random() + torch.rand(())
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return images + noise, labels


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ImageNetDataModule, dict(mix_mode="batch", num_workers=2)),
        (ImageNetDataModule, dict(mix_mode="pair")),
        (Noise, dict(mix_mode="elem", backend="timm")),
        (
            ImageNetDataModule,
            NO_MIXING | dict(repeats=1, backend="timm", auto_augment="3a", color_jitter=0.3),
        ),
        (ImageNetDataModule, dict(augment_ops=["PIL.ImageOps:autocontrast"])),
        (OwnTransform, dict(num_workers=2)),
    ],
)
def test_the_batches_are_those_of_training_to_the_bit(kind, settings, mixed_root):
    (mixed_root / "train/cat/0.jpg").write_bytes(b"no image")  # so that another stands in
    settings = SETTINGS | dict(root=str(mixed_root)) | settings
    captured = Capture()
    steps = GradientAccumulationScheduler({0: 4, 1: 2})
    fit = trainer(callbacks=[captured, steps], limit_val_batches=0)
    fit.fit(module(num_classes=3), datamodule=kind(**settings))
    batches = TrainingBatches(kind(**settings), trainer(callbacks=[steps]))
    assert (batches.batches_per_epoch, batches.steps) == (6, 5)
    places = [place for step in range(5) for place in batches.of_step(step)]
    assert places == list(captured.batches)
    replaced = []
    for place in reversed(places):  # any order will do
        batch = batches.read(*place, 0)
        images, targets = captured.batches[place]
        assert torch.equal(batch.images, images)
        assert torch.equal(batch.targets, targets)
        assert (images.amin(dim=(1, 2, 3)) < images.amax(dim=(1, 2, 3))).any()
        replaced += [image.instead_of for image in batch.seen if image.instead_of]
    assert {Path(file).name for file in replaced} == {"0.jpg"}


def region(box):
    top, left, height, width = box
    return slice(None), slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize("backend", ["auto", "timm"])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_what_is_said_of_a_batch_makes_it_out_of_the_images_before(mixed_root, backend, mode):
    """Mix and erase by what is noted, from batches without mixing and erasing."""

    def read(**settings):
        settings = SETTINGS | dict(root=str(mixed_root), backend=backend) | settings
        batches = TrainingBatches(ImageNetDataModule(**settings), trainer())
        return [batches.read(epoch, batch, 0) for epoch in range(2) for batch in range(3)]

    noted = set()
    mixed = read(mix_mode=mode)
    erased = read(**NO_MIXING)
    plain = read(**NO_MIXING, erase_prob=0.0)
    for after, before, untouched in zip(mixed, erased, plain, strict=True):
        for image in after.seen:
            place = image.place
            noted |= {image.mixed, bool(image.erased)}
            changed = before.images[place] != untouched.images[place]
            inside = torch.zeros_like(changed)
            if image.erased:
                inside[region(image.erased)] = True
            assert torch.equal(changed.any(dim=0), inside.any(dim=0))
            expected = before.images[place].clone()
            target = image.share * torch.eye(3)[image.label]
            if image.partner is not None:
                partner = before.images[image.partner]
                target += (1 - image.share) * torch.eye(3)[after.seen[image.partner].label]
                if image.box:
                    expected[region(image.box)] = partner[region(image.box)]
                else:
                    expected = torch.lerp(partner, expected, image.share)
            torch.testing.assert_close(after.images[place], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(after.targets[place], target)
    assert noted == {"mixup", "cutmix", "", True, False}


@pytest.mark.parametrize(("number", "pages"), [(1, 1), (65, 2)])
def test_a_sheet_for_any_number_of_images(number, pages):
    cell = Cell(np.zeros((8, 8, 3)), "#0 a.png", {"red": (1, 1, 2, 2)})
    figures = list(contact_sheet.pages([cell] * number, "title"))
    assert len(figures) == pages
    assert sum(len(axes.images) for figure in figures for axes in figure.axes) == number


def test_a_checkpoint_that_was_replaced_is_noticed():
    fit = trainer(callbacks=[StepRecord(5, range(6, 7))])
    with pytest.raises(UserError, match="is of step 0, not 5"):
        fit.fit(module(), torch.utils.data.DataLoader([torch.zeros(1)]))


def test_help_does_not_wait_for_lightning():
    code = "import sys; sys.modules['lightning'] = sys.modules['torch'] = None\n"
    done = python(code + "from cait.cli import main; main(['replay', '--help'])")
    assert "usage: cait replay RUN --step N" in done.stdout, done.stderr


# Whole runs

RECIPE = [
    *SMALL,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
    "--data.mix_prob=0.6",
]
# The raw loss sinks, so the first epoch is the "best": a checkpoint from within validation, far before the last.
FIRST_IS_BEST = ["--best_metric=val/loss", "--best_mode=max"]


@pytest.fixture(scope="module")
def killed(place):
    """A run of 66 steps that was killed in its second epoch and resumed."""
    once = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=32"]
    recipe = [*RECIPE, *FIRST_IS_BEST, *once, "--save_every_n_steps=5", "--run_name=killed"]
    assert call(place, "fit", *recipe).returncode == 137
    assert call(place, "resume", "killed").returncode == 0
    return place / "logs/killed"


def replay(place, *words):
    done = call(place, "replay", *words, "--images=1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(run):
    """What lies in a run's folder, besides what replay writes."""
    files = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "replay")
    return {path: path.read_bytes() for path in files}


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def logged(run):
    """The training rows of metrics.csv by step."""
    return {int(row["step"]): row for row in rows(run) if row["train/loss"]}


def shown(output):
    """(value, what metrics.csv has) by step and metric, from the table on the screen."""
    cells = re.findall(r"│ (\d+) +│ (\S+) +│ (\S+) +│ (.+?) +│", output)
    return {(int(step), name): (value, there) for step, name, value, there in cells}


def assert_as_logged(output, run, steps):
    expected = logged(run)
    names = ("train/loss", "train/acc1", "train/grad_norm", "lr")
    assert shown(output) == {
        (step, name): (expected[step][name], "same") for step in steps for name in names
    }, output


@pytest.mark.parametrize(
    ("first", "begin"),
    [
        (3, "no checkpoint lies before it, so from the first step: steps 0 to 12 are"),
        *slow(
            (36, "checkpoints/best.ckpt: steps 22 to 45 are"),  # before the kill, and after
            (65, "checkpoints/previous.ckpt: steps 65 to 65 are"),
        ),
    ],
)
def test_the_steps_of_a_killed_run_are_those_of_metrics_csv(place, killed, first, begin):
    before = contents(killed)
    steps = range(first, min(first + 10, 66))
    output = replay(place, "killed", f"--step={first}", f"--count={len(steps)}")
    assert begin in output
    assert_as_logged(output, killed, steps)
    assert contents(killed) == before
    assert f"logs/killed/replay/step-{first:06d}.png" in output.splitlines()
    folder = killed / "replay"
    assert not list(folder.glob(".*"))
    for step in steps:
        expected = logged(killed)[step]
        images = table(folder / f"step-{step:06d}.csv")
        loss = np.mean([float(image["loss"]) for image in images])
        assert loss == pytest.approx(float(expected["train/loss"]), rel=1e-5)
        layers = table(folder / f"step-{step:06d}-gradients.csv")
        norm = np.linalg.norm([float(layer["norm"]) for layer in layers])
        assert norm == pytest.approx(float(expected["train/grad_norm"]), rel=1e-5)
        assert Image.open(folder / f"step-{step:06d}.png").width > 500


WRITES = """
from pathlib import Path
from lightning.pytorch import Callback

class Writes(Callback):
    def on_train_start(self, trainer, pl_module):
        Path(trainer.default_root_dir, "seen").touch()
"""


def test_a_run_that_lost_its_checkpoints_begins_with_its_first_step(place, killed):
    bare = place / "logs/bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        shutil.copy(killed / name, bare)
    (place / "writes.py").write_text(WRITES)
    own = "--trainer.callbacks+=writes.Writes"
    assert_as_logged(replay(place, "bare", "--step=1", own), killed, range(1, 2))
    assert (bare / "replay/seen").exists()
    assert {path.name for path in bare.iterdir()} == {"config.yaml", "metrics.csv", "replay"}


def test_a_run_that_solved_its_head_and_planned_its_epochs_anew(place, killed, monkeypatch):
    weights = checkpoint(killed)["state_dict"]
    body = {name: weight for name, weight in weights.items() if "head" not in name}
    torch.save(body, place / "a.pth")
    monkeypatch.setattr("cait.extras.recipe.plan.most_epochs", lambda *_: 3)
    recipe = [
        *SMALL,
        "--data.num_workers=0",
        "--trainer.limit_train_batches=4",
        "--trainer.log_every_n_steps=1",
        "--trainer.max_epochs=2",
        "--model.weights=a.pth",
        "--model.solve_head=true",
        "--plan_minutes=1000",
        "--save_every_n_steps=4",
    ]
    run = ended(place, "planned", recipe)
    (run / "checkpoints/best.ckpt").unlink()
    # before the plan, and more than there was to be
    assert_as_logged(replay(place, "planned", "--step=3", "--count=8"), run, range(3, 11))
    (place / "a.pth").unlink()  # of no use from a checkpoint on
    assert_as_logged(replay(place, "planned", "--step=9", "--count=2"), run, range(9, 11))


def test_a_difference_is_shown(place, killed):
    table = shutil.copytree(killed, place / "logs/changed") / "metrics.csv"
    row = logged(killed)[65]
    table.write_text(table.read_text().replace(f",65,{row['train/acc1']},", ",65,,"))
    again = shown(replay(place, "changed", "--step=65", "--model.lr=1e-3"))
    assert again[65, "train/loss"] == (row["train/loss"], "same")
    assert again[65, "train/acc1"] == (row["train/acc1"], "not logged")
    lr, before = again[65, "lr"]
    assert lr != before == row["lr"]


def test_data_only_needs_neither_checkpoint_nor_network(place, killed, monkeypatch):
    replay(place, "killed", "--step=65", "--output=with")
    replay(place, "killed", "--step=65", "--data-only", "--output=without")
    for whole, image in zip(
        table(place / "with/step-000065.csv"),
        table(place / "without/step-000065.csv"),
        strict=True,
    ):
        assert image == whole | {"loss": ""}
    monkeypatch.setattr("cait.model.network.create_model", None)
    config = [
        *SMALL,
        "--model.name=m48",
        "--trainer.accelerator=gpu",
        *("--trainer.devices", "2"),
        "--data.mixup=0",
        "--data.cutmix=0",
        "--data.erase_prob=1",
    ]
    output = replay(place, *config, "--data-only", "--step=7")
    assert output.splitlines()[-2:] == ["replay/step-000007.png", "replay/step-000007.csv"]
    images = table(place / "replay/step-000007.csv")
    assert [image["process"] for image in images] == ["0"] * 32 + ["1"] * 32
    assert all(image["erased"] and not image["mixed"] for image in images)
    first, second = ([image["file"] for image in images[half : half + 32]] for half in (0, 32))
    assert first != second


OTHERS = {
    "two": [*TWO, *FIRST_IS_BEST],
    "taught": [
        "--model.distillation=soft",
        "--model.teacher=logs/killed/checkpoints/last.ckpt",
        "--trainer.accumulate_grad_batches=4",
        "--trainer.gradient_clip_val=0.5",
        "--trainer.precision=bf16-mixed",
        "--trainer.callbacks=[{class_path: lightning.pytorch.callbacks.LearningRateMonitor}, "
        "{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss}}]",
    ],
}
"""Two processes; and accumulation, clipping, bfloat16, a teacher, and callbacks of the run's own."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("two", 2), ("taught", 4)])
def test_other_recipes_are_the_same_too(name, parts, place, killed):
    run = ended(place, name, [*RECIPE, *OTHERS[name]])
    before = contents(run)
    for first in (2, checkpoint(run)["global_step"] - 3):
        output = replay(place, name, f"--step={first}", "--count=2")
        assert_as_logged(output, run, range(first, first + 2))
        images = table(run / f"replay/step-{first:06d}.csv")
        assert len(images) == 64
        assert len({(image["batch"], image["process"]) for image in images}) == parts
    assert contents(run) == before


@pytest.mark.slow
def test_while_the_run_trains(place):
    endless = ["--trainer.max_epochs=2000", "--save_every_n_steps=1", "--run_name=training"]
    job = start(place, "fit", *RECIPE, *endless)
    run = place / "logs/training"
    try:
        wait_for_steps(run, 30, job)
        output = replay(place, "training", "--step=25")
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    assert_as_logged(output, run, range(25, 26))

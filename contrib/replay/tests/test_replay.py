"""`cait replay`: the pixels of a past step are those that training saw, its loss and gradients those of metrics.csv."""

import os
import random
import re
import shutil
import signal
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import files_in
from harness import (
    SMALL,
    beside,
    call,
    checkpoint,
    ended,
    over_table,
    parsed,
    python,
    rows,
    start,
    works,
)
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from modules import module, trainer
from PIL import Image
from runs import wait_for_steps
from same import same
from torchvision import transforms

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from contrib.replay.step_record import StepRecord
from contrib.replay.training_batches import TrainingBatches

TABLE = beside(__file__)
WORDS = TABLE["words"]
RECIPE = [*SMALL, *WORDS["of every run"].split()]
NO_MIXING = dict(mixup=0.0, cutmix=0.0)


class OwnTransform(ImageNetDataModule):
    """Float images from a transform that draws from torch's generator."""

    def make_train_transform(self):
        return transforms.Compose(
            [transforms.RandomResizedCrop(self.img_size), transforms.ToTensor()]
        )


class Noise(ImageNetDataModule):
    """Noise on the device, from each generator."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        noise = random.random() + np.random.random() + torch.rand(())
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return images + noise, labels


KINDS = {kind.__name__: kind for kind in (ImageNetDataModule, OwnTransform, Noise)}


def images_of(root, kind=ImageNetDataModule, **settings):
    return kind(str(root), **TABLE["every"] | settings)


@over_table(__file__, "batches")
def test_the_batches_are_those_of_training_to_the_bit(kind, settings, mixed_root):
    (mixed_root / "train/cat/0.jpg").write_bytes(b"no image")  # so that another stands in
    images = partial(images_of, mixed_root, KINDS[kind], **settings)
    captured = {}

    def capture(fit, net, batch, number):
        captured[fit.current_epoch, number] = deepcopy(batch)

    steps = GradientAccumulationScheduler({0: 4, 1: 2})
    callbacks = [LambdaCallback(on_train_batch_start=capture), steps]
    fit = trainer(callbacks=callbacks, limit_val_batches=0)
    fit.fit(module(num_classes=3), datamodule=images())
    batches = TrainingBatches(images(), trainer(callbacks=[steps]))
    places = [place for step in range(batches.steps) for place in batches.of_step(step)]
    assert places == list(captured)
    replaced = set()
    for place in reversed(places):  # any order will do
        batch = batches.read(*place, 0)
        assert same([batch.images, batch.targets], captured[place])
        replaced |= {image.instead_of for image in batch.seen if image.instead_of}
    assert [Path(file).name for file in replaced] == ["0.jpg"]


def region(box):
    top, left, height, width = box
    return slice(None), slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize("backend", ["auto", "timm"])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_what_is_said_of_a_batch_makes_it_out_of_the_images_before(mixed_root, backend, mode):
    """Mix and erase by what is noted, from batches without mixing and erasing."""

    def read(**settings):
        images = images_of(mixed_root, backend=backend, **settings)
        batches = TrainingBatches(images, trainer())
        return [batches.read(epoch, batch, 0) for epoch in range(2) for batch in range(3)]

    noted = set()
    erased = read(**NO_MIXING)
    plain = read(**NO_MIXING, erase_prob=0.0)
    for after, before, untouched in zip(read(mix_mode=mode), erased, plain, strict=True):
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


def test_help_does_not_wait_for_lightning():
    code = "import sys; sys.modules['lightning'] = sys.modules['torch'] = None\n"
    done = python(code + "from cait.cli import main; main(['replay', '--help'])")
    assert "usage: cait replay RUN --step N" in done.stdout, done.stderr


def test_a_checkpoint_that_was_replaced_is_noticed():
    fit = trainer(callbacks=[StepRecord(5, range(6, 7))])
    with pytest.raises(UserError, match="is of step 0, not 5"):
        fit.fit(module(), torch.utils.data.DataLoader([torch.zeros(1)]))


# Whole runs


@pytest.fixture(scope="module")
def killed(place):
    """A run of 66 steps that was killed in its second epoch and resumed."""
    recipe = [*RECIPE, *WORDS["killed"].split(), "--run_name=killed"]
    assert call(place, "fit", *recipe).returncode == 137
    works(call(place, "resume", "killed"))
    return place / "logs/killed"


def replay(place, *words):
    return works(call(place, "replay", *words, "--images=1")).stdout


def contents(run):
    """What lies in a run's folder, besides what replay writes."""
    return {path: content for path, content in files_in(run).items() if "replay" not in path.parts}


def logged(run):
    """The training rows of metrics.csv by step."""
    return {int(row["step"]): row for row in rows(run) if row["train/loss"]}


def shown(output):
    """(value, what metrics.csv has) by step and metric, from the table on the screen."""
    cells = re.findall(r"│ (\d+) +│ (\S+) +│ (\S+) +│ (.+?) +│", output)
    return {(int(step), name): (value, there) for step, name, value, there in cells}


def assert_as_logged(output, run, steps):
    expected = {}
    for step in steps:
        for name in ("train/loss", "train/acc1", "train/grad_norm", "lr"):
            expected[step, name] = (logged(run)[step][name], "same")
    assert shown(output) == expected, output


@over_table(__file__, "begun")
def test_the_steps_of_a_killed_run_are_those_of_metrics_csv(place, killed, first, begin):
    before = contents(killed)
    steps = range(first, min(first + 10, 66))
    output = replay(place, "killed", f"--step={first}", f"--count={len(steps)}")
    assert begin in output
    assert_as_logged(output, killed, steps)
    assert contents(killed) == before
    assert f"logs/killed/replay/step-{first:06d}.png" in output.splitlines()
    for step in steps:
        expected = logged(killed)[step]
        file = killed / f"replay/step-{step:06d}"
        losses = [float(image["loss"]) for image in parsed(Path(f"{file}.csv"))]
        assert np.mean(losses) == pytest.approx(float(expected["train/loss"]), rel=1e-5)
        norms = [float(layer["norm"]) for layer in parsed(Path(f"{file}-gradients.csv"))]
        assert np.linalg.norm(norms) == pytest.approx(float(expected["train/grad_norm"]), rel=1e-5)
        assert Image.open(f"{file}.png").width > 500


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
    run = ended(place, "planned", [*SMALL, *WORDS["planned"].split()])
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
    images = parsed(place / "without/step-000065.csv")
    assert images == [row | {"loss": ""} for row in parsed(place / "with/step-000065.csv")]
    monkeypatch.setattr("cait.model.network.create_model", None)
    output = replay(place, *SMALL, *WORDS["data only"].split())
    assert output.splitlines()[-2:] == ["replay/step-000007.png", "replay/step-000007.csv"]
    images = parsed(place / "replay/step-000007.csv")
    assert [image["process"] for image in images] == ["0"] * 32 + ["1"] * 32
    assert all(image["erased"] and not image["mixed"] for image in images)
    files = [image["file"] for image in images]
    assert files[:32] != files[32:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("two", 2), ("taught", 4)])
def test_other_recipes_are_the_same_too(name, parts, place, killed):
    run = ended(place, name, [*RECIPE, *WORDS[name].split()])
    before = contents(run)
    for first in (2, checkpoint(run)["global_step"] - 3):
        output = replay(place, name, f"--step={first}", "--count=2")
        assert_as_logged(output, run, range(first, first + 2))
        images = parsed(run / f"replay/step-{first:06d}.csv")
        assert len(images) == 64
        assert len({(image["batch"], image["process"]) for image in images}) == parts
    assert contents(run) == before


@pytest.mark.slow
def test_while_the_run_trains(place):
    words = "--trainer.max_epochs=2000 --save_every_n_steps=1 --run_name=training"
    job = start(place, "fit", *RECIPE, *words.split())
    run = place / "logs/training"
    try:
        wait_for_steps(run, 30, job)
        output = replay(place, "training", "--step=25")
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    assert_as_logged(output, run, range(25, 26))

"""`cait replay`: the pixels of a past step are those that training saw, its loss and gradients those of metrics.csv."""

import csv
import hashlib
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
from harness import SMALL, checkpoint, python, rows, slow, start
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from modules import module, trainer
from PIL import Image
from runs import wait_for_steps
from torchvision import transforms

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from contrib.replay import contact_sheet
from contrib.replay.contact_sheet import Cell
from contrib.replay.step_record import StepRecord
from contrib.replay.training_batches import TrainingBatches

SETTINGS = dict(
    img_size=8,
    batch_size=6,
    num_workers=0,
    repeats=3,
    erase_prob=0.7,
    mix_prob=0.8,
    auto_augment="rand-m9-mstd0.5-inc1",
    seed=3,
)


class Capture(Callback):
    """Copies of the batches that training gets, by (epoch, batch)."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], list[torch.Tensor]] = {}

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches[trainer.current_epoch, batch_idx] = [part.clone() for part in batch]


class OwnTransform(ImageNetDataModule):
    """Float images from a transform that draws from torch's generator."""

    def make_train_transform(self) -> Any:
        resize = transforms.RandomResizedCrop(self.img_size)
        return transforms.Compose(
            [resize, transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
        )


class Noise(ImageNetDataModule):
    """Noise on the device, from each generator."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = random.random() + np.random.random() + torch.rand(())
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return images + noise, labels


@pytest.mark.parametrize(
    "given",
    [
        dict(mix_mode="batch", num_workers=2),
        dict(mix_mode="pair"),
        dict(mix_mode="elem", backend="timm", kind=Noise),
        dict(
            mixup=0.0,
            cutmix=0.0,
            repeats=1,
            backend="timm",
            num_workers=2,
            auto_augment="3a",
            color_jitter=0.3,
        ),
        dict(augment_ops=["PIL.ImageOps:autocontrast"]),
        dict(kind=OwnTransform, num_workers=2),
    ],
    ids=lambda given: " ".join(map(str, given.values())),
)
def test_the_batches_are_those_of_training_to_the_bit(mixed_root: Path, given: dict) -> None:
    (mixed_root / "train/cat/0.jpg").write_bytes(b"no image")  # so that another stands in
    settings = SETTINGS | dict(root=str(mixed_root), max_bad_share=0.5) | given
    kind = settings.pop("kind", ImageNetDataModule)
    captured = Capture()
    network = module(num_classes=3)
    steps = GradientAccumulationScheduler({0: 4, 1: 2})
    trainer(callbacks=[captured, steps], limit_val_batches=0).fit(
        network, datamodule=kind(**settings)
    )
    batches = TrainingBatches(kind(**settings), trainer(callbacks=[steps]))
    assert (batches.batches_per_epoch, batches.steps) == (6, 5)
    places = [place for step in range(5) for place in batches.of_step(step)]
    assert places == list(captured.batches)
    stand_ins = 0
    for place in reversed(places):  # any order will do
        got = batches.read(*place, 0)
        images, targets = captured.batches[place]
        assert torch.equal(got.images, images)
        assert torch.equal(got.targets, targets)
        assert (images.amin(dim=(1, 2, 3)) < images.amax(dim=(1, 2, 3))).any()
        stand_ins += sum(bool(image.instead_of) for image in got.seen)
        assert all("0.jpg" in image.instead_of for image in got.seen if image.instead_of)
    assert stand_ins > 0


@pytest.mark.parametrize("backend", ["auto", "timm"])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_what_is_said_of_a_batch_makes_it_out_of_the_images_before(
    mixed_root: Path, backend: str, mode: str
) -> None:
    """Mix and erase by what is noted, from batches without mixing and erasing."""

    def read(**given: Any) -> list:
        settings = SETTINGS | dict(root=str(mixed_root), backend=backend, mix_mode=mode) | given
        batches = TrainingBatches(ImageNetDataModule(**settings), trainer())
        return [batches.read(epoch, batch, 0) for epoch in range(2) for batch in range(3)]

    mixed, kinds = read(), set()
    erased = read(mixup=0.0, cutmix=0.0)
    plain = read(mixup=0.0, cutmix=0.0, erase_prob=0.0)
    for after, before, untouched in zip(mixed, erased, plain, strict=True):
        for image in after.seen:
            kinds.add(image.mixed)
            place, own = image.place, before.images[image.place].clone()
            changed = (own != untouched.images[place]).any(dim=0)
            inside = torch.zeros_like(changed)
            if image.erased:
                kinds.add("erased")
                top, left, height, width = image.erased
                inside[top : top + height, left : left + width] = True
            assert torch.equal(changed, inside)
            target = torch.zeros(3)
            target[image.label] += image.share
            if image.partner is not None:
                other = before.images[image.partner]
                target[after.seen[image.partner].label] += 1 - image.share
                if image.box:
                    top, left, height, width = image.box
                    own[:, top : top + height, left : left + width] = other[
                        :, top : top + height, left : left + width
                    ]
                else:
                    own = own * image.share + other * (1 - image.share)
            torch.testing.assert_close(after.images[place], own, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(after.targets[place], target)
    assert kinds == {"mixup", "cutmix", "", "erased"}


def test_each_process_has_its_own_batch(mixed_root: Path) -> None:
    settings = SETTINGS | dict(root=str(mixed_root))
    both = TrainingBatches(ImageNetDataModule(**settings), trainer(devices=2, strategy="ddp"))
    assert both.batches_per_epoch == 3
    first, second = (both.read(1, 2, process) for process in range(2))
    assert [image.index for image in first.seen] != [image.index for image in second.seen]
    assert {image.process for image in second.seen} == {1}


def test_a_sheet_for_any_number_of_images() -> None:
    cell = Cell(np.zeros((8, 8, 3)), "#0 a.png", {"red": (1, 1, 2, 2)})
    for number, pages in ((1, 1), (65, 2)):
        figures = list(contact_sheet.pages([cell] * number, "title"))
        assert len(figures) == pages
        assert sum(len(axes.images) for figure in figures for axes in figure.axes) == number


# ----------------------------------------------------------------------------------------------- whole runs

RECIPE = [
    *SMALL,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
    "--data.mix_prob=0.6",
]
# The raw loss sinks, so the first epoch is the "best": a checkpoint from within validation, far before the last.
FIRST_IS_BEST = ["--best_metric=val/loss", "--best_mode=max", "--save_every_n_steps=5"]


def cait(place: Path, *arguments: str) -> str:
    job = start(place, *arguments)
    output, _ = job.communicate()
    assert job.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def killed(place: Path) -> Path:
    """A run that was killed in its second epoch and resumed."""
    job = start(place, "fit", *RECIPE, *FIRST_IS_BEST, "--run_name=killed")
    wait_for_steps(place / "logs/killed", 32, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    cait(place, "resume", "killed")
    return place / "logs/killed"


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "replay")
    return {str(path): hashlib.sha1(path.read_bytes()).hexdigest() for path in files}


def replayed(output: str) -> dict[tuple[int, str], tuple[str, str]]:
    """(value, what metrics.csv has) by step and metric, from the table on the screen."""
    found = re.findall(r"│ (\d+) +│ (\S+) +│ (\S+) +│ (.+?) +│", output)
    return {(int(step), name): (value, there) for step, name, value, there in found}


def assert_as_logged(output: str, run: Path, steps: range) -> None:
    logged = {int(row["step"]): row for row in rows(run) if row["train/loss"]}
    got = replayed(output)
    names = ("train/loss", "train/acc1", "train/grad_norm", "lr")
    assert got == {
        (step, name): (logged[step][name], "same") for step in steps for name in names
    }, output


@pytest.mark.parametrize(
    ("first", "begin"),
    [
        (
            3,
            "no checkpoint lies before it, so from the first step: steps 0 to 12 are trained again",
        ),
        *slow(
            (36, "checkpoints/best.ckpt: steps 22 to 45 are"),  # before the kill, and after
            (65, "checkpoints/previous.ckpt: steps 65 to 65 are"),
        ),
    ],
)
def test_the_steps_of_a_killed_run_are_those_of_metrics_csv(
    place: Path, killed: Path, first: int, begin: str
) -> None:
    before = digests(killed)
    count = min(10, 66 - first)
    output = cait(place, "replay", "killed", f"--step={first}", f"--count={count}", "--images=1")
    assert begin in output
    assert_as_logged(output, killed, range(first, first + count))
    assert digests(killed) == before
    assert f"logs/killed/replay/step-{first:06d}.png" in output.splitlines()
    assert not list((killed / "replay").glob(".*"))
    for step in range(first, first + count):
        stem = killed / "replay" / f"step-{step:06d}"
        with stem.with_suffix(".csv").open() as file:
            images = list(csv.DictReader(file))
        loss = float(replayed(output)[step, "train/loss"][0])
        assert np.mean([float(image["loss"]) for image in images]) == pytest.approx(loss, rel=1e-5)
        with stem.with_name(f"{stem.name}-gradients.csv").open() as file:
            norms = [float(line["norm"]) for line in csv.DictReader(file)]
        norm = float(replayed(output)[step, "train/grad_norm"][0])
        assert np.linalg.norm(norms) == pytest.approx(norm, rel=1e-5)
        assert Image.open(stem.with_suffix(".png")).width > 500


WRITES = """
from pathlib import Path
from lightning.pytorch import Callback

class Writes(Callback):
    def on_train_start(self, trainer, pl_module):
        Path(trainer.default_root_dir, "seen").touch()
"""


def test_a_run_that_lost_its_checkpoints_begins_with_its_first_step(
    place: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(place)
    bare = place / "logs/bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        shutil.copy(killed / name, bare)
    (place / "writes.py").write_text(WRITES)
    main(["replay", "bare", "--step=1", "--images=1", "--trainer.callbacks+=writes.Writes"])
    assert (bare / "replay/seen").exists()
    assert_as_logged(capsys.readouterr().out, killed, range(1, 2))
    assert sorted(path.name for path in bare.iterdir()) == ["config.yaml", "metrics.csv", "replay"]


def test_a_run_that_solved_its_head_and_planned_its_epochs_anew(
    place: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(place)
    torch.save(
        {
            name: each
            for name, each in checkpoint(killed)["state_dict"].items()
            if "head" not in name
        },
        "a.pth",
    )
    monkeypatch.setattr("cait.extras.recipe.plan.most_epochs", lambda *_: 3)
    short = [
        "--data.num_workers=0",
        "--trainer.limit_train_batches=4",
        "--trainer.log_every_n_steps=1",
    ]
    short += [
        "--model.weights=a.pth",
        "--model.solve_head=true",
        "--trainer.max_epochs=2",
        "--plan_minutes=1000",
    ]
    short += ["--save_every_n_steps=4"]
    main(["fit", *SMALL, *short, "--run_name=planned"])
    Path("logs/planned/checkpoints/best.ckpt").unlink()
    # before the plan, and more than there was to be
    main(["replay", "planned", "--step=3", "--count=8", "--images=1"])
    assert_as_logged(capsys.readouterr().out, place / "logs/planned", range(3, 11))
    Path("a.pth").unlink()  # of no use from a checkpoint on
    main(["replay", "planned", "--step=9", "--count=2", "--images=1"])
    assert_as_logged(capsys.readouterr().out, place / "logs/planned", range(9, 11))


@pytest.mark.slow
def test_other_recipes_are_the_same_too(place: Path, killed: Path) -> None:
    """A teacher, a moving average, accumulation, clipping, bfloat16, a callback of the run's own."""
    recipe = [
        *(*RECIPE, "--model.distillation=soft", f"--model.teacher={killed}/checkpoints/last.ckpt"),
        *(
            "--trainer.accumulate_grad_batches=4",
            "--trainer.gradient_clip_val=0.5",
            "--trainer.precision=bf16-mixed",
        ),
        "--trainer.callbacks=[{class_path: lightning.pytorch.callbacks.LearningRateMonitor}, "
        "{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss}}]",
    ]
    cait(place, "fit", *recipe, "--run_name=taught")
    run = place / "logs/taught"
    steps = checkpoint(run)["global_step"]
    before = digests(run)
    output = cait(place, "replay", "taught", f"--step={steps - 3}", "--count=3", "--images=1")
    assert_as_logged(output, run, range(steps - 3, steps))
    assert digests(run) == before
    with (run / f"replay/step-{steps - 2:06d}.csv").open() as file:
        batches = [(image["epoch"], image["batch"]) for image in csv.DictReader(file)]
    assert len(set(batches)) == 4
    assert len(batches) == 64


@pytest.mark.slow
def test_two_processes(place: Path) -> None:
    two = [
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        "--best_metric=val/loss",
        "--best_mode=max",
    ]
    cait(place, "fit", *RECIPE, *two, "--run_name=two")
    run = place / "logs/two"
    for first in (2, 30):
        output = cait(place, "replay", "two", f"--step={first}", "--count=2")
        assert_as_logged(output, run, range(first, first + 2))
        with (run / f"replay/step-{first:06d}.csv").open() as file:
            images = list(csv.DictReader(file))
        assert [image["process"] for image in images] == ["0"] * 32 + ["1"] * 32
        loss = float(replayed(output)[first, "train/loss"][0])
        assert np.mean([float(image["loss"]) for image in images]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_while_the_run_trains(place: Path) -> None:
    job = start(
        place,
        "fit",
        *RECIPE,
        "--trainer.max_epochs=2000",
        "--save_every_n_steps=1",
        "--run_name=training",
    )
    try:
        run = place / "logs/training"
        wait_for_steps(run, 30, job)
        output = cait(place, "replay", "training", "--step=25", "--images=1")
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    assert_as_logged(output, run, range(25, 26))


def test_a_difference_is_shown(place: Path, killed: Path) -> None:
    copy = place / "logs/changed"
    shutil.copytree(killed, copy)
    logged = {int(row["step"]): row for row in rows(killed) if row["train/loss"]}[65]
    text = (copy / "metrics.csv").read_text()
    (copy / "metrics.csv").write_text(text.replace(f",65,{logged['train/acc1']},", ",65,,"))
    got = replayed(cait(place, "replay", "changed", "--step=65", "--images=1", "--model.lr=1e-3"))
    assert got[65, "train/loss"] == (logged["train/loss"], "same")
    assert got[65, "train/acc1"] == (logged["train/acc1"], "not logged")
    assert got[65, "lr"][0] != got[65, "lr"][1] == logged["lr"]


def test_data_only_needs_neither_checkpoint_nor_network(
    place: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(place)
    main(["replay", "killed", "--step=65", "--images=2", "--output=with"])
    main(["replay", "killed", "--step=65", "--images=2", "--data-only", "--output=without"])
    with_loss, without = (
        (place / name / "step-000065.csv").read_text() for name in ("with", "without")
    )
    assert re.sub(r",[^,]+$", ",", with_loss, flags=re.M) == re.sub(
        r",[^,]*$", ",", without, flags=re.M
    )
    monkeypatch.setattr("cait.model.network.create_model", None)
    config = [
        *SMALL,
        "--model.name=m48",
        "--trainer.accelerator=gpu",
        "--trainer.devices=2",
        "--data-only",
        "--step=7",
    ]
    main(
        [
            "replay",
            *config,
            "--images=2",
            "--data.mixup=0",
            "--data.cutmix=0",
            "--data.erase_prob=1",
        ]
    )
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "replay/step-000007.png",
        "replay/step-000007.csv",
    ]
    with (place / "replay/step-000007.csv").open() as file:
        images = list(csv.DictReader(file))
    assert [image["process"] for image in images] == ["0"] * 32 + ["1"] * 32
    assert all(image["erased"] and not image["mixed"] for image in images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "killed --step 60 --count 9 --data-only",
            "there is no step 68: the run has 66, from 0 to 65",
        ),
        ("killed --step 66", "there is no step 66: the run has 66, from 0 to 65"),
        ("killed --step -1", "--step must be at least 0, got -1"),
        ("killed --step 1 --count 0", "--count and --images must be at least 1"),
        (
            "killed --step 1 --data-only --ckpt_path x",
            "--data-only reads no checkpoint: leave out --ckpt_path",
        ),
        ("killed --step 1 --ckpt_path none.ckpt", "the checkpoint none.ckpt does not exist"),
        (
            "killed --step 1 --ckpt_path logs/killed/checkpoints/last.ckpt",
            "last.ckpt is of step 66, after step 1",
        ),
        (
            "killed --step 1 --data.root other --data-only",
            "digest of the training pictures' names was",
        ),
        ("killed --step 1 --data.rot other --data-only", "did you mean --data.root?"),
        ("killed", "the following arguments are required: --step"),
        ("kiled --step 1", "there is no run logs/kiled; did you mean killed?"),
        ("killed --step 1 --output c.yaml", "c.yaml is no folder; name one with --output"),
        ("--config c.yaml --step 1", "which run?"),
        ("--step 1 --data-only", "which run?"),
    ],
)
def test_bad_input_gets_one_line(
    place: Path,
    killed: Path,
    digits_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(place)
    if not (place / "other").exists():
        shutil.copytree(digits_root, place / "other")
        first, *_ = sorted((place / "other/train/3").iterdir())
        first.rename(first.with_name("another.png"))
        (place / "c.yaml").touch()
    with pytest.raises(SystemExit) as stop:
        main(["replay", *arguments.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("cait: error: ")
    assert message in error


def test_a_strangers_run_names_code(
    place: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    (place / "logs/strange/checkpoints").mkdir(parents=True)
    shutil.copy(killed / "checkpoints/last.ckpt", place / "logs/strange/checkpoints")
    text = (killed / "config.yaml").read_text()
    (place / "logs/strange/config.yaml").write_text(
        text.replace("augment_ops: null", "augment_ops: ['os:getcwd']")
    )
    for option in ("--data-only", "--count=1"):
        with pytest.raises(SystemExit):
            main(["replay", "strange", "--step=65", option])
        assert "config.yaml names os:getcwd, which may do anything" in capsys.readouterr().err
    (place / "logs/strange/config.yaml").write_text(
        text.replace("  callbacks: null", "  callbacks: os.path.Own")
    )
    with pytest.raises(SystemExit):  # a run of one's own beside it lends it no trust
        main(["replay", "strange", "--step=65", "--config=logs/killed/config.yaml"])
    assert "config.yaml names os.path.Own, which may do anything" in capsys.readouterr().err


def test_a_checkpoint_that_was_replaced_is_noticed() -> None:
    with pytest.raises(UserError, match="is of step 0, not 5"):
        trainer(callbacks=[StepRecord(5, range(6, 7))]).fit(
            module(), torch.utils.data.DataLoader([torch.zeros(1)])
        )


def test_help_does_not_wait_for_lightning() -> None:
    code = "import sys; sys.modules['lightning'] = sys.modules['torch'] = None\n"
    done = python(code + "from cait.cli import main; main(['replay', '--help'])")
    assert "usage: cait replay RUN --step N" in done.stdout, done.stderr

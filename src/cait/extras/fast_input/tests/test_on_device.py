"""Augmentation on the device: workers' pixels on the CPU, timm's from the kernel, exact resume."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCUDAAccelerator, FakeCUDAStrategy, Spy, fake_cuda
from harness import LIMIT, SMALL, ended, environment, save_classes, start
from lightning.pytorch import Callback, Trainer
from modules import module
from PIL import Image
from runs import kill_and_resume
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP
from torch import Tensor

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras.fast_input.steps import BICUBIC, WARPS, Note, apply, record

SIDE = 24
FILL = (124, 116, 104)
KNOWN = [name for name, timms in NAME_TO_OP.items() if Note.knows(timms, BICUBIC)]
POLICIES = ["rand-m9-mstd0.5-inc1", "rand-m12-n4-mstd1-mmax15", "rand-m5-tweights", "original", "v0", "originalr"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    save_classes(photographs, root := tmp_path_factory.mktemp("photographs"), 6, 2)
    return root


def images(root: Path, place: str, policy: str, **settings: Any) -> ImageNetDataModule:
    defaults: dict = dict(img_size=SIDE, batch_size=4, num_workers=0, auto_augment=policy, repeats=1)
    data = ImageNetDataModule(str(root), augment_on=place, **(defaults | settings))
    data.setup("fit")
    return data


def normalized(data: ImageNetDataModule, keys: list[Any]) -> Tensor:
    collate = data.train_dataloader().collate_fn
    return data._normalized(collate([data.train_images[key] for key in keys]))[0]


def check_policy(root: Path, policy: str, draws: int, **settings: Any) -> None:
    worker, device = (images(root, place, policy, **settings) for place in ("worker", "device"))
    for epoch in range(0, draws, 12):
        keys = [(epoch, index, repeat) for index in range(6) for repeat in range(2)]
        assert torch.equal(normalized(worker, keys), normalized(device, keys)), (policy, epoch)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pixels_on_the_cpu_are_the_workers(folder: Path, policy: str) -> None:
    check_policy(folder, policy, 120)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_draws_are_the_workers(folder: Path, policy: str) -> None:
    check_policy(folder, policy, 10_000 // len(POLICIES))


@pytest.mark.parametrize(
    "settings",
    [dict(auto_augment=None), dict(hflip=1.0), dict(fit="pad"), dict(train_crop="simple"), dict(mean=[0.2] * 3)],
)
def test_so_they_are_whatever_the_crop(folder: Path, settings: dict) -> None:
    check_policy(folder, settings.pop("auto_augment", POLICIES[0]), 48, **settings)


def test_workers_and_one_decoding_for_all_repeats_change_nothing(folder: Path) -> None:
    settings: dict = dict(repeats=3, decode_once=True, batch_size=6)
    found = []
    for place, workers in (("worker", 0), ("device", 1)):
        loader = images(folder, place, POLICIES[0], num_workers=workers, **settings).train_dataloader()
        found.append([batch.clone() for batch, _ in loader])
    assert len(found[0]) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(auto_augment="3a"), r"cannot do .*GaussianBlurRand"),
        (dict(interpolation="bilinear"), r"cannot do .*Rotate.* with bilinear interpolation"),
        (dict(augment_ops=["PIL.ImageOps:invert"]), "cannot do OwnOperation"),
        (dict(augment_on="gpu"), "augment_on must be"),
        (dict(backend="timm"), "backend timm is timm's own transform, in the workers"),
    ],
)
def test_what_the_device_cannot_do_is_refused(folder: Path, settings: dict, message: str) -> None:
    settings = dict(auto_augment=POLICIES[0], augment_on="device") | settings
    with pytest.raises(UserError, match=message):
        _ = ImageNetDataModule(str(folder), img_size=SIDE, **settings).pipeline


def drawn(count: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Crops of noise and of ramps, a step for each, and what timm makes of them."""
    crops, steps, expected = [], [], []
    for number in range(count):
        draw, name = np.random.default_rng(number), KNOWN[number % len(KNOWN)]
        random.seed(number)
        pixels = draw.integers(*sorted(draw.choice(257, 2, replace=False)), (SIDE, SIDE, 3)).astype(np.uint8)
        if number // len(KNOWN) % 3 == 1:  # one colour, except in three columns
            pixels[:, 3:] = pixels[0, 0]
        level = LEVEL_TO_ARG[name]
        amount = level(random.uniform(0, 10), dict(translate_const=18)) if level else ()
        if level and number % 11 == 0 and NAME_TO_OP[name] in WARPS:
            amount = (random.choice([0, 1e5, -3.5]),)
        flips = number % 3 == 0
        image = Image.fromarray(pixels[:, ::-1] if flips else pixels)
        expected.append(np.asarray(NAME_TO_OP[name](image, *amount, resample=BICUBIC, fillcolor=FILL)))
        crops.append(pixels)
        steps.append(record(Note(NAME_TO_OP[name], SIDE)([], *amount), 1, flips))
    return crops, steps, expected


def test_each_operation_is_timms() -> None:
    crops, steps, expected = drawn(10 * len(KNOWN))
    found = [apply(pixels, *noted, FILL) for pixels, noted in zip(crops, steps, strict=True)]
    differences = np.abs(np.stack(found).astype(int) - np.stack(expected))
    assert differences.max() <= 1  # in the shifts, as in the workers
    assert differences.mean() < 0.01
    assert len(KNOWN) == 24


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernel is tested here, not in another process")
def test_the_kernel_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-k", "from_the_kernel", "-m", pytestconfig.option.markexpr]
    interpreted = environment() | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout


@pytest.fixture
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        from cait.extras.fast_input import kernel

        monkeypatch.setattr(kernel, "PIXELS", 1024)


@pytest.mark.usefixtures("fewer_programs")
@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run under Triton's interpreter, in another process")
@pytest.mark.parametrize("draws", [48, pytest.param(2_400, marks=pytest.mark.slow)])
def test_pixels_from_the_kernel_are_timms_to_the_bit(draws: int) -> None:
    from cait.extras.fast_input.kernel import augment

    crops, steps, expected = drawn(draws)
    device = "cuda" if CUDA else "cpu"
    given = (torch.from_numpy(np.stack(each).view(np.uint8)).to(device) for each in (crops, steps))
    found = augment(*given, *FILL).cpu().numpy()
    wrong = np.nonzero((found != np.stack(expected)).any(axis=(1, 2, 3)))[0]
    assert not wrong.size, [KNOWN[number % len(KNOWN)] for number in wrong]


@pytest.mark.usefixtures("fewer_programs")
@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run under Triton's interpreter, in another process")
def test_steps_from_the_kernel_follow_each_other() -> None:
    from cait.extras.fast_input.kernel import augment

    crops, steps, _ = drawn(8)
    orders = np.stack([np.concatenate([steps[(i + k) % 8] for k in (0, 5, 7)]) for i in range(8)])
    orders["code"][:, 1:] &= 255  # a flip comes first of all
    device = "cuda" if CUDA else "cpu"
    batch = torch.from_numpy(np.stack(crops)).to(device)
    found = augment(batch, torch.from_numpy(orders.view(np.uint8)).to(device), *FILL)
    one_by_one = batch
    for k in range(3):
        part = torch.from_numpy(np.ascontiguousarray(orders[:, k : k + 1]).view(np.uint8)).to(device)
        one_by_one = augment(one_by_one, part, *FILL)
    assert torch.equal(found, one_by_one)
    assert not torch.equal(found, batch)
    assert torch.equal(batch.cpu(), torch.from_numpy(np.stack(crops)))  # it is the caller's


def test_the_host_does_not_wait(folder: Path) -> None:
    waits: list[list[str]] = []

    class Mark(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            spy.waits = []
            waits.append(spy.waits)

    spy: Spy
    with fake_cuda() as spy:
        data = images(folder, "device", POLICIES[0], repeats=3, erase_prob=0.5)
        quiet: dict = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        Trainer(
            accelerator=FakeCUDAAccelerator(),
            strategy=FakeCUDAStrategy(spy),
            callbacks=[Mark()],
            max_epochs=2,
            limit_val_batches=0,
            enable_model_summary=False,
            **quiet,
        ).fit(module(img_size=SIDE, num_classes=3), data)
    assert len(waits) >= 4
    assert not waits[2], waits[2]
    assert "cait.augment" in spy.operations


BRIEF = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=4", "--save_every_n_steps=3", "--data.num_workers=1"]
RECIPE = [
    *SMALL,
    *BRIEF,
    "--ema.decay=0.9",
    "--data.augment_on=device",
    "--data.repeats=3",
    "--trainer.log_every_n_steps=1",
]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(place: Path) -> None:
    kill_and_resume(place, RECIPE, ended(place, "whole", RECIPE))
    moved = start(place, "resume", "killed", "--data.augment_on=worker", "--trainer.max_epochs=3")
    output = moved.communicate(timeout=LIMIT)[0]
    assert moved.returncode != 0
    assert "pixels by was cait, augmented on the device, is cait" in output

"""What the recipe chooses by a survey of the images, the machine, a trial of a few steps, and what is given."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from class_folders import fill
from networks import needs_cait
from PIL import Image

from cait.data.reading import AS_SEEN, Reading
from cait.data.source import open_source
from cait.extras.display import duration
from cait.extras.recipe import figures
from cait.extras.recipe.figures import Machine, Settings, Survey, Trial, survey, this_machine
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.weights import Weights
from cait.run.program import Program

TWO_CORES = Machine(2)


@dataclass(frozen=True)
class Typical(Trial):
    """Measures of a machine that takes so long for an image of 64 pixels, whatever the network."""

    image: float = 4e-3
    has_head: bool = False

    def begun(self) -> float:
        return 9.0

    def takes_head(self, held: Settings, classes: int) -> bool:
        return self.has_head

    def step(self, held: Settings, size: int) -> float | None:
        return None if "no_such" in held.get("model.name", "") else self.image * (size / 64) ** 2


PUBLISHED = Weights("timm's", {"model.pretrained": True})
RESNET = {"model.name": "timm/resnet10t"}
PHOTOGRAPHS = Survey({"cat": 300, "dog": 280}, 60, side=480, gray=False)
DIGITS = Survey({str(digit): 600 for digit in range(10)}, 600, side=28, gray=True)


def surveyed(root: Path, reading: Reading = AS_SEEN) -> Survey:
    return survey(open_source(str(root)), reading)


def test_the_survey_counts_and_reads_the_images_as_the_run_will(tmp_path: Path) -> None:
    for name, gray in (("gray", True), ("color", False)):
        root = fill(tmp_path / name, {"a": 6, "b": 3}, gray=gray)
        found = surveyed(root)
        assert (found.counts, found.val, found.side, found.gray) == ({"a": 5, "b": 2}, 2, 24, gray)
        pixels = (
            np.stack([np.asarray(Image.open(path).convert("RGB")) for path in root.rglob("*.png")])
            / 255
        )
        assert np.allclose(found.mean, pixels.mean((0, 1, 2)), atol=0.1)
    as_grey = surveyed(root, Reading(in_chans=1))
    assert as_grey.gray
    assert as_grey.mean[0] == pytest.approx(np.dot(found.mean, (0.299, 0.587, 0.114)), abs=0.005)
    for name in ("a", "b"):
        for number in range(4):  # black where nobody sees it
            (tmp_path / "clear" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(
                tmp_path / "clear" / name / f"{number}.png"
            )
    for background, mean in (("white", 1.0), (None, 0.0)):
        assert surveyed(tmp_path / "clear", Reading(background=background)).mean == (mean,) * 3


def recipe(
    folder: Survey = PHOTOGRAPHS,
    given: Settings | None = None,
    measure: Trial = Typical(),
    weights: Weights | None = None,
    minutes: float = 3,
    machine: Machine = TWO_CORES,
) -> Recipe:
    return choose(folder, machine, given or {}, measure, weights, minutes)


GREY, RANDOM = replace(PHOTOGRAPHS, gray=True), "rand-m6-mstd0.5-inc1"
LARGE = replace(PHOTOGRAPHS, side=3000)


def uneven(few: int, many: int = 300, **figures) -> Survey:
    return replace(PHOTOGRAPHS, counts={"many": many, "few": few}, **figures)


OF_CAIT: list = [
    (DIGITS, {}, {"data.img_size": 32, "data.hflip": 0.0, "data.auto_augment": None}),
    (PHOTOGRAPHS, {}, {"data.img_size": 64, "data.hflip": 0.5, "data.auto_augment": RANDOM}),
    (
        replace(DIGITS, side=48),
        {},
        {"data.img_size": 48, "data.hflip": 0.0, "model.fields.patch_size": 8},
    ),
    (
        PHOTOGRAPHS,
        {},
        {"model.fields.stem": "pooled", "model.fields.depth": 1, "model.fields.mlp_ratio": 2.0},
    ),
    # each of two cores reads four batches of 600 images
    (
        DIGITS,
        {},
        {"data.eval_batch_size": 75},
    ),
    (PHOTOGRAPHS, {"model.fields.stem": "patch"}, {"model.fields.depth": 4}),
    (LARGE, {}, {"data.shrink": 128}),
    (replace(LARGE, side=250), {}, {"data.shrink": 128}),  # a few may be huge
    (
        PHOTOGRAPHS,
        {"data.img_size": 96},
        {"data.img_size": "absent", "model.fields.patch_size": 16},
    ),
    (
        PHOTOGRAPHS,
        {"model.name": "s24"},
        {"model.fields.depth": "absent", "model.fields.embed_dim": "absent"},
    ),
]


@pytest.mark.parametrize(
    ("folder", "given", "expected"),
    [
        (GREY, {}, {"data.hflip": 0.0, "data.auto_augment": None, "data.scale": [0.7, 1.0]}),
        (uneven(13, 1300, gray=True), {}, {"data.auto_augment": RANDOM}),
        (uneven(200, 1300, gray=True), {}, {"data.auto_augment": None}),
        (uneven(13, 1300, gray=True, side=28), {}, {"data.auto_augment": None}),
        (PHOTOGRAPHS, {}, {"data.eval_batch_size": 16, "data.global_batch": True}),
        # of even parts
        (
            uneven(58, 58),
            {"trainer.accumulate_grad_batches": 4},
            {"data.batch_size": 8},
        ),
        (uneven(150), {}, {"data.balance": "absent"}),
        (uneven(60), {}, {"data.balance": "sqrt"}),
        (uneven(30), {}, {"data.balance": "full", "best_metric": "val/acc1_macro"}),
        (LARGE, {"data.img_size": 96}, {"data.shrink": 192}),
        # the last is validated
        (
            PHOTOGRAPHS,
            {"trainer.max_epochs": 97},
            {"trainer.check_val_every_n_epoch": 1},
        ),
        (PHOTOGRAPHS, {"trainer.max_epochs": 120}, {"trainer.check_val_every_n_epoch": 4}),
        (
            PHOTOGRAPHS,
            {"trainer.max_epochs": 7},
            {"trainer.max_epochs": "absent", "model.warmup_epochs": 0.7},
        ),
        (PHOTOGRAPHS, {"trainer.max_epochs": None}, {"trainer.check_val_every_n_epoch": 1}),
        (PHOTOGRAPHS, {"trainer.check_val_every_n_epoch": None}, {"model.warmup_epochs": 5.0}),
        (PHOTOGRAPHS, {"trainer.max_steps": 5}, {"trainer.max_epochs": "absent"}),
        (
            PHOTOGRAPHS,
            {"model.optimizer": "adamw"},
            {"model.optimizer": "absent", "model.lr": 1e-3},
        ),
        *(pytest.param(*each, marks=needs_cait) for each in OF_CAIT),
    ],
)
def test_the_rules_go_by_the_images_the_classes_and_what_is_given(
    folder: Survey, given: dict, expected: dict
) -> None:
    found = recipe(folder, given).settings
    assert {name: found.get(name, "absent") for name in expected} == expected


def test_a_class_of_few_images_is_told() -> None:
    told = [
        "a fair result needs at least 20" in dict(recipe(uneven(few)).lines).get("warning", "")
        for few in (19, 20)
    ]
    assert told == [True, False]
    assert recipe(uneven(2, 2)).settings  # four images are enough
    assert (
        "all are drawn alike, as given"
        in dict(recipe(uneven(30), {"data.balance": None}).lines)["balance"]
    )


@needs_cait
@pytest.mark.parametrize(
    ("machine", "patches"),
    [(TWO_CORES, [4, 8, 4, 8, 16, 16, 1, 1]), (Machine(16, 1, True), [2, 2, 3, 3, 4, 6, 1, 1])],
)
def test_the_blocks_see_few_patches(machine: Machine, patches: list[int]) -> None:
    assert recipe(machine=machine).settings["data.img_size"] == (128 if machine.gpus else 64)
    found = [
        recipe(given={"data.img_size": size}, machine=machine)
        for size in (28, 32, 36, 48, 64, 96, 2, 1)
    ]
    assert [each.settings["model.fields.patch_size"] for each in found] == patches
    assert found[0].settings["model.fields.depth"] == (12 if machine.gpus else 1)
    assert found[0].settings["model.drop_path_rate"] == (0.1 if machine.gpus else 0.0)


@pytest.mark.parametrize(
    ("name", "weights", "image", "side", "size"),
    [
        ("timm/resnet10t", None, 4e-3, 28, 64),
        ("timm/resnet10t", None, 4e-3, 480, 96),
        ("timm/no_such_network", None, 4e-3, 48, 224),
        ("timm/resnet10t", PUBLISHED, 6e-4, 480, 224),
        ("timm/resnet10t", PUBLISHED, 8e-4, 480, 192),
        ("timm/resnet10t", PUBLISHED, 3e-2, 480, 128),
        ("timm/resnet10t", PUBLISHED, 1e-3, 48, 128),
        ("timm/resnet10t", PUBLISHED, 1e-3, 90, 160),
    ],
)
def test_other_networks_see_the_largest_images_for_which_there_is_time(
    name: str, weights: Weights | None, image: float, side: int, size: int
) -> None:
    found = recipe(
        replace(PHOTOGRAPHS, side=side), {"model.name": name}, Typical(image), weights
    ).settings
    assert found["data.img_size"] == size
    assert found.get("data.mean") == (None if weights else list(PHOTOGRAPHS.mean))
    assert found.get("data.std") == (None if weights else list(PHOTOGRAPHS.std))
    assert found["model.lr"] == (3e-4 if weights else 1e-3)
    assert found.get("model.solve_head", False) is bool(weights)
    assert found.get("model.fields.intermediates", False) is bool(weights)
    assert not any(
        key.startswith(("model.fields.patch", "model.fields.stem", "model.optimizer"))
        for key in found
    )


def test_the_head_is_solved_and_the_rest_trains_gently() -> None:
    found = recipe(given=RESNET, weights=PUBLISHED).settings
    assert (found["model.freeze_norm"], found["model.lr"], found["data.mixup"]) == (True, 3e-4, 0.0)
    assert (found["model.freeze"], found["model.fields.intermediates"]) == (0.33, True)
    on_gpu = recipe(given=RESNET, machine=Machine(2, gpus=1), weights=PUBLISHED).settings
    assert "model.freeze" not in on_gpu
    kept = recipe(given=RESNET, measure=Typical(has_head=True), weights=PUBLISHED).settings
    assert (kept["model.freeze"], "model.fields.intermediates" in kept) == (0.33, False)
    of_run = recipe(
        weights=Weights("a run's", RESNET | {"model.weights": "x.ckpt", "data.img_size": 64})
    )
    assert (of_run.solves_head, of_run.settings["model.layer_decay"]) == (False, 0.75)
    distilled = recipe(
        given={"model.name": "timm/deit_tiny_distilled_patch16_224"}, weights=PUBLISHED
    ).settings
    assert "model.fields.intermediates" not in distilled
    rare = recipe(uneven(30), RESNET, weights=PUBLISHED).settings
    assert (rare["data.balance"], "best_metric" in rare) == ("sqrt", False)
    planes = recipe(given=RESNET | {"model.fields.in_chans": 5}, weights=PUBLISHED).settings
    assert "model.freeze" not in planes  # its first layer is new
    held = recipe(
        given=RESNET | {"model.freeze": False}, measure=Typical(0.07), weights=PUBLISHED
    ).settings
    assert held["data.img_size"] == 128
    slow = recipe(given=RESNET, measure=Typical(1.0), weights=PUBLISHED)
    assert slow.settings["model.freeze"] is True
    assert (slow.settings["trainer.max_epochs"], "trainer.max_steps" in slow.settings) == (1, False)
    assert "because not one epoch fits" in dict(slow.lines)["frozen"]
    whole = recipe(given=RESNET | {"model.solve_head": False}, weights=PUBLISHED).settings
    assert (whole["model.lr"], whole["model.layer_decay"]) == (3e-4, 0.75)


@needs_cait
def test_the_measured_pace_sets_the_length_and_the_minutes_are_kept() -> None:
    for minutes in (1, 3, 10):
        for image, val, many in (
            (1e-3, 60, 300),
            (0.05, 1200, 300),
            (1e-4, 60, 300),
            (2e-3, 5000, 1_281_167),
        ):
            folder = replace(PHOTOGRAPHS, val=val, counts={"a": many, "b": 280})
            found = recipe(folder, measure=Typical(image), minutes=minutes)
            epochs, every = (
                found.settings[f"trainer.{name}"]
                for name in ("max_epochs", "check_val_every_n_epoch")
            )
            if "trainer.max_steps" in found.settings:  # an epoch that does not fit is not begun
                assert found.settings["trainer.max_steps"] * 64 * image < 60 * minutes
                assert "plan_minutes" not in found.settings
                continue
            assert found.settings["plan_minutes"] == minutes
            image *= figures.OVERHEAD
            seconds = (
                9
                + figures.SETUP
                + epochs * (folder.images * image + figures.EPOCH)
                + epochs / every * val * image / 3
            )
            assert seconds <= 60 * minutes or epochs == 1
            assert (
                f"about {duration(10 * round(seconds / 10))} on 2 cores, planned anew"
                in dict(found.lines)["length"]
            )
    assert "plan_minutes" not in recipe(given={"trainer.max_epochs": 3}).settings


def test_a_trial_measures_a_network_at_a_size_and_knows_whose_head_the_weights_have(
    tmp_path: Path,
) -> None:
    measure = Trial(Program())
    quick = {"trainer.accelerator": "cpu", "model.name": "timm/resnet10t"}
    small, large = (measure.step(quick, size) for size in (32, 128))
    assert small is not None
    assert large is not None
    assert 0 < small < large
    assert measure.step(quick | {"model.name": "timm/no_such_network"}, 64) is None
    assert measure.begun() > 0
    torch.save(timm.create_model("resnet10t", num_classes=3).state_dict(), tmp_path / "w.pth")
    of_file = quick | {"model.weights": str(tmp_path / "w.pth"), "model.freeze": 0.33}
    assert [measure.takes_head(of_file, classes) for classes in (3, 4)] == [True, False]
    assert measure.step(of_file, 32) is not None


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", False), ("amx_bf16 amx_tile", True)])
def test_a_processor_with_units_for_bfloat16_trains_in_it(
    flags: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(figures, "Path", lambda _: tmp_path / "cpuinfo")
    assert this_machine({"trainer.accelerator": "cpu"}).fast_bf16 == fast


@pytest.mark.parametrize(
    ("name", "mixed"), [("xxs24", True), ("timm/resnet10t", True), ("timm/lcnet_035", False)]
)
def test_convolutions_of_single_channels_train_in_float32_on_a_processor(
    name: str, mixed: bool
) -> None:
    found = recipe(given={"model.name": name}, machine=Machine(2, fast_bf16=True)).settings
    assert found.get("trainer.precision") == ("bf16-mixed" if mixed else None)


# T4, V100 and RTX 20; A100
@pytest.mark.parametrize(("capability", "fast"), [(7, False), (8, True)])
def test_a_gpu_that_emulates_bfloat16_trains_in_float32(
    capability: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=capability)
    )
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)  # the emulation
    machine = this_machine({})
    assert (machine.gpus, machine.fast_bf16) == (1, fast)
    chosen = recipe(machine=machine).settings
    assert chosen.get("trainer.precision") == ("bf16-mixed" if fast else None)

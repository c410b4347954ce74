"""A run from weights races one from scratch: the better goes on, and a kill in any phase changes no bit of it."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import yaml
from harness import LIMIT, checkpoint, rows, start
from networks import needs_cait
from same import same

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.extras.recipe import race
from cait.extras.recipe.race import SCRATCH, WEIGHTS, enter, noise, share, unlikeness, verdict
from cait.extras.recipe.rules import Recipe
from cait.loops import Position
from cait.model.config import VARIANTS

LITTLE, MUCH = 1e-3, 1e9
"""Seconds of the run from scratch: it is judged after its first epoch, or once it is ahead."""
COMMON: dict[str, Any] = {
    "data": {"root": "few", "batch_size": 20, "num_workers": 0, "repeats": 1}
    | {
        "mixup": 0.0,
        "cutmix": 0.0,
        "auto_augment": None,
        "hflip": 0.0,
        "erase_prob": 0.0,
        "scale": [0.8, 1.0],
    },
    "trainer": {"accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1},
    "baselines": False,
}


def settings(model: dict[str, Any], size: int, **more: Any) -> dict[str, Any]:
    model = {"lr_base_size": None, "warmup_epochs": 0} | model
    return COMMON | {"data": COMMON["data"] | {"img_size": size}, "model": model} | more


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits_root: Path) -> Path:
    """A part of the digits, and weights that tell them apart, or give all images the same features."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 20), ("val", 8)):
        for number in range(10):
            (folder := tmp_path / "few" / part / str(number)).mkdir(parents=True)
            for file in sorted((digits_root / part / str(number)).iterdir())[:count]:
                shutil.copy(file, folder)
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet")
    torch.save(network.state_dict(), "good.pth")
    torch.nn.init.zeros_(network.conv_head.weight)
    torch.save(network.state_dict(), "blind.pth")
    return tmp_path


def write(
    weights: str,
    seconds: float | None = None,
    killed_at: int | None = None,
    unlike: float | None = None,
) -> None:
    """Settings of a run from weights that races one from scratch, which has so many seconds; None lets it not race.

    With `killed_at` the one that first begins this step is killed. With `unlike` the images must be at least as far
    from those of the weights.
    """
    fields = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 2}
    if VARIANTS:  # CaiT may have been deleted
        fields |= {"stem": "conv", "layer_scale_init": 1.0}
    scratch = settings({"name": "xxs24", "fields": fields, "lr": 6e-3, "optimizer": "muon"}, 8)
    start = {
        "name": "timm/test_efficientnet",
        "weights": weights,
        "solve_head": True,
        "freeze_norm": True,
        "lr": 1e-4,
    }
    raced = seconds and {"seconds": seconds, "settings": scratch, "unlike": unlike}
    whole = settings(start, 32, race=raced)
    if killed_at is not None:
        leaves = {"class_path": "recorder.LeavesOnce", "init_args": {"step": killed_at}}
        whole["trainer"] = scratch["trainer"] = COMMON["trainer"] | {"callbacks": [leaves]}
    Path("race.yaml").write_text(json.dumps(whole))  # YAML without aliases


def fit(weights: str, name: str, *given: Any) -> Path:
    write(weights, *given)
    main(["fit", "--config=race.yaml", f"--run_name={name}"])
    return Path("logs", name)


def test_the_solved_head_goes_on_as_if_there_had_been_no_race(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raced = fit("good.pth", "raced", LITTLE)
    assert "race: from scratch has 0 s to be ahead by more than the noise" in caplog.text
    assert "race won by weights: val/acc1 of the solved head" in caplog.text
    assert (raced / "scratch/checkpoints/last.ckpt").is_file()
    alone = fit("good.pth", "alone", LITTLE, None, 9.0)
    assert "no race: by BatchNorm the images are like those of the weights" in caplog.text
    assert not (alone / "scratch").exists()
    assert same(checkpoint(raced)["state_dict"], checkpoint(alone)["state_dict"])
    assert rows(raced) == rows(alone)
    assert yaml.safe_load((raced / "config.yaml").read_text())["model"]["weights"] == "good.pth"


@needs_cait  # a small ViT learns nothing in three epochs
def test_the_run_from_scratch_takes_the_place_and_goes_on(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    won = fit("blind.pth", SCRATCH, MUCH, None, 1e-6)  # a name like that of the folder inside it
    assert "race won by scratch: val/acc1 of the solved head 10" in caplog.text
    kept = yaml.safe_load((won / "config.yaml").read_text())
    assert (kept["model"]["name"], kept["run_name"]) == ("xxs24", SCRATCH)
    assert rows(won)[0]["val/acc1"] == ""  # nothing of step 0 of the other
    Path("alone.json").write_text(
        json.dumps({name: value for name, value in kept.items() if name != "race"})
    )
    main(["fit", "--config=alone.json", "--run_name=alone", "--trainer.default_root_dir=logs"])
    alone = Path("logs/alone")
    assert rows(won) == rows(alone)
    assert same(checkpoint(won)["state_dict"], checkpoint(alone)["state_dict"])
    main(["eval", SCRATCH])


@pytest.mark.slow
def test_what_is_given_is_for_the_run_from_scratch_too(here: Path) -> None:
    write("blind.pth", MUCH, 12)
    given = ["--data.batch_size=10", "--model.freeze_norm=false"]  # the last of weights
    with pytest.raises(SystemExit):
        main(["fit", "--config=race.yaml", "--run_name=cut", *given])
    assert (
        yaml.safe_load(Path("logs/cut/scratch/config.yaml").read_text())["data"]["batch_size"] == 10
    )
    main(["resume", "cut", "--trainer.max_epochs=2"])
    assert Position.saved(checkpoint(Path("logs/cut"))) == (2, 0, 40)
    main(
        [
            "fit",
            "--config=logs/cut/config.yaml",
            "--run_name=again",
            "--race=false",
            "--trainer.max_epochs=1",
        ]
    )
    assert yaml.safe_load(Path("logs/again/config.yaml").read_text())["race"] is None


@pytest.mark.parametrize(
    ("given", "epochs", "plans", "told"),
    [
        ({}, 40, {"plan_minutes": 3.0}, "after the head is solved, from scratch gets 54 s"),
        ({"plan_minutes": 3.0}, 40, {}, "after the head is solved"),
        ({"trainer.max_epochs": 20}, 20, {}, "none, because --trainer.max_epochs is given"),
        (
            {"best_metric": "val/loss"},
            40,
            {"plan_minutes": 3.0},
            "none, because it is about acc1, acc1_macro, mAP",
        ),
        ({}, 20, {"plan_minutes": 3.0}, "none, because from scratch 6.0 epochs would fit"),
        ({}, 40, {}, "none, because the head alone is trained"),
    ],
)
def test_a_line_says_whether_there_is_a_race(
    given: dict, epochs: int, plans: dict, told: str
) -> None:
    recipe, scratch = (Recipe(given, None, 3.0) for _ in range(2))
    scratch.take_all({"trainer.max_epochs": epochs, "plan_minutes": 3.0})
    recipe.take_all(plans)
    enter(recipe, scratch, True)
    assert recipe.lines[0][1].startswith(told)
    assert ("race" in recipe.settings) == told.startswith("after")


def test_a_network_that_has_seen_the_images_is_near_to_them(here: Path) -> None:
    def data(mean: float) -> ImageNetDataModule:
        data = ImageNetDataModule(
            root="few", img_size=32, num_workers=0, eval_batch_size=200, mean=(mean,) * 3
        )
        data.setup("fit")
        data.predict_samples = data.train_images.samples
        return data

    usual, other = data(0.5), data(0.9)
    network = timm.create_model("test_efficientnet", bn_momentum=1.0).train()
    network(next(iter(usual.predict_dataloader()))[0])
    near, far = (
        unlikeness(network, each.predict_samples, each, torch.device("cpu"))
        for each in (usual, other)
    )
    assert near < 0.1
    assert far > 0.5
    without = timm.create_model("test_vit", img_size=32)  # it has no BatchNorm, so nothing tells
    assert unlikeness(without, other.predict_samples, other, torch.device("cpu")) is None


def test_who_is_ahead_by_more_than_the_noise_wins() -> None:
    assert verdict(0.54, 0.80, 80, 0.1, 5) == SCRATCH
    assert verdict(0.80, 0.82, 80, 0.9, 40) == ""
    assert verdict(0.80, 0.82, 80, 1.0, 40) == WEIGHTS
    assert verdict(0.80, 0.35, 80, 0.4, 20) == ""
    assert verdict(0.80, 0.35, 80, 0.6, 5) == ""
    assert verdict(0.80, 0.35, 80, 0.6, 10) == WEIGHTS
    assert noise(0.5, 0.5, 100) == pytest.approx(0.0707, abs=1e-4)
    assert [round(share(minutes) / 60 / minutes, 2) for minutes in (1, 3, 10)] == [0.3, 0.3, 0.16]


@needs_cait
@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "step"),
    [("good.pth", 0), ("good.pth", 12), ("good.pth", 22), ("blind.pth", 12), ("blind.pth", 22)],
)
def test_a_race_that_is_killed_ends_with_the_same_bits(weights: str, step: int, here: Path) -> None:
    """The run from scratch is judged after its step 10, and of blind weights has won after step 20."""
    seconds = LITTLE if weights == "good.pth" else MUCH
    whole = fit(weights, "whole", seconds)
    with pytest.raises(SystemExit):
        fit(weights, "cut", seconds, step)
    main(["resume", "cut"])
    assert same(checkpoint(Path("logs/cut"))["state_dict"], checkpoint(whole)["state_dict"])
    assert rows(Path("logs/cut")) == rows(whole)


@needs_cait
@pytest.mark.slow
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_kill_while_one_run_takes_the_place_of_the_other_loses_nothing(
    moved: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, moves = fit("blind.pth", "whole", MUCH), []

    def replace(source: Any, target: Any) -> None:
        moves.append(source)
        if len(moves) > moved:
            raise KeyboardInterrupt
        return real(source, target)

    real = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(race, "os", SimpleNamespace(replace=replace))
        with pytest.raises(SystemExit):
            fit("blind.pth", "cut", MUCH)
    main(["resume", "cut"])
    assert same(checkpoint(Path("logs/cut"))["state_dict"], checkpoint(whole)["state_dict"])
    assert rows(Path("logs/cut")) == rows(whole)


@needs_cait
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["good.pth", "blind.pth"])
def test_two_processes_race_too(weights: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMON, "trainer", COMMON["trainer"] | {"devices": 2, "strategy": "ddp"})
    monkeypatch.setitem(
        COMMON, "data", COMMON["data"] | {"batch_size": COMMON["data"]["batch_size"] // 2}
    )
    write(weights, LITTLE if weights == "good.pth" else MUCH, 12)
    job = start(here, "fit", "--config=race.yaml", "--run_name=cut")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode, output
    job = start(here, "resume", "cut")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    kept = yaml.safe_load((here / "logs/cut/config.yaml").read_text())
    assert kept["model"]["name"] == ("timm/test_efficientnet" if weights == "good.pth" else "xxs24")
    assert Position.saved(checkpoint(here / "logs/cut")).epoch == 3

"""The shipped configurations say what the papers' recipes say."""

from pathlib import Path

import yaml
from harness import call


def resolved(folder: Path, *words: str) -> dict:
    done = call(folder, "fit", "--config=imagenet/xxs24_224.yaml", *words, "--print_config")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_xxs24_is_the_published_recipe(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    model, data, trainer = config["model"], config["data"], config["trainer"]
    assert (model["lr"], model["lr_base_size"], model["warmup_lr"], model["min_lr"]) == (
        5e-4,
        512,
        1e-6,
        1e-5,
    )
    assert (model["weight_decay"], model["warmup_epochs"], model["label_smoothing"]) == (
        0.05,
        5,
        0.1,
    )
    assert (trainer["max_epochs"], trainer["precision"], trainer["gradient_clip_val"]) == (
        400,
        "bf16-mixed",
        None,
    )
    assert (data["mixup"], data["cutmix"], data["mix_prob"], data["mix_switch_prob"]) == (
        0.8,
        1.0,
        1.0,
        0.5,
    )
    assert (data["auto_augment"], data["erase_prob"], data["repeats"]) == (
        "rand-m9-mstd0.5-inc1",
        0.25,
        3,
    )
    assert (data["crop_pct"], data["interpolation"], data["img_size"]) == (1.0, "bicubic", 224)
    assert config["ema"]["decay"] == 0.99996
    assert trainer["use_distributed_sampler"] is False


def test_deit3_is_the_published_recipe(tmp_path: Path) -> None:
    """The command of README_revenge.md in facebookresearch/deit, for ViT-S, with main.py's defaults."""
    config = resolved(
        tmp_path, "--config=imagenet/deit3.yaml", "--model.name=timm/deit3_small_patch16_224"
    )
    model, data = config["model"], config["data"]
    assert (model["optimizer"], model["optimizer_args"], model["lr"], model["lr_base_size"]) == (
        "lamb",
        {"eps": 1e-8},
        4e-3,
        None,
    )
    assert (model["weight_decay"], model["warmup_epochs"], model["warmup_lr"], model["min_lr"]) == (
        0.05,
        5,
        1e-6,
        1e-5,
    )
    assert (model["loss"], model["label_smoothing"], config["trainer"]["max_epochs"]) == (
        "bce",
        0.0,
        800,
    )
    assert (data["batch_size"], data["global_batch"], data["repeats"], data["erase_prob"]) == (
        2048,
        True,
        3,
        0.0,
    )
    assert (data["auto_augment"], data["color_jitter"], data["mixup"], data["cutmix"]) == (
        "3a",
        0.3,
        0.8,
        1.0,
    )
    assert (data["scale"], data["crop_pct"]) == ([0.08, 1.0], 1.0)
    assert config["trainer"]["gradient_clip_val"] is None

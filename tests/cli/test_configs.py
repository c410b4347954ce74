"""Every YAML that is shipped parses and says what the paper's recipe says."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from harness import DEVICES, REPO, Cait, rows

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.guards.configurations import is_overlay, load, without_absent

RECIPE = REPO / "configs/imagenet/xxs24_224.yaml"
CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))


def resolved(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["cait"])
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), *more, "--print_config"])
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPO)))
def test_every_config_parses_and_is_honoured(path: Path, capsys, monkeypatch) -> None:
    given = yaml.safe_load(path.read_text())
    if "seed_everything" in given:
        config = resolved(path, capsys, monkeypatch)
        assert config["seed_everything"] == given.pop("seed_everything")
    else:  # an overlay
        config = resolved(RECIPE, capsys, monkeypatch, "--config", str(path))
    for section, settings in given.items():  # model, data, trainer, ema, logger, logger_args
        if not isinstance(settings, dict):
            assert config[section] == settings
            continue
        for key, value in settings.items():
            found = config[section][key]
            if isinstance(value, dict) and "init_args" in value:  # the parser adds the defaults of the class
                found = found | {"init_args": {name: found["init_args"][name] for name in value["init_args"]}}
            assert found == value, key


def test_the_plain_file_has_nothing_of_the_recipe_and_trains(cait: Cait, tmp_path: Path) -> None:
    """What it trains on is the crop, flipped or not, and nothing else; the learning rate is as given."""
    shutil.copy(REPO / "configs/base.yaml", tmp_path / "mine.yaml")
    fields = "{embed_dim: 16, depth: 1, num_heads: 1, patch_size: 8}"
    few = ["--trainer.max_steps=3", "--trainer.log_every_n_steps=1", "--model.warmup_epochs=0"]
    done = cait("fit", "--config", "mine.yaml", *DEVICES, *few, "--model.fields", fields)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs/mine"
    lr = yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"]["lr"]
    assert float(rows(run)[0]["lr"]) == pytest.approx(lr, rel=1e-6)
    settings = yaml.safe_load((run / "config.yaml").read_text())["data"]
    data = ImageNetDataModule(**{key: settings[key] for key in ("auto_augment", "erase_prob", "hflip", "scale")})
    steps = [type(step).__name__ for step in data.augmentation.transform(data.preprocessing).transforms]
    assert steps == ["RandomResizedCropAndInterpolation", "RandomHorizontalFlip", "MaybeToTensor", "Normalize"]
    assert (settings["repeats"], settings["mixup"], settings["cutmix"]) == (1, 0.0, 0.0)


def test_an_overlay_says_neither_data_nor_model(tmp_path: Path) -> None:
    for text, is_one in [("logger: wandb\ntrainer: {max_epochs: 2}\n", True), ("model: {lr: 1.0}\n", False)]:
        (tmp_path / "it.yaml").write_text(text)
        assert is_overlay(tmp_path / "it.yaml") == is_one, text
    assert is_overlay(Path("configs/trainer/debug.yaml"))


def test_what_an_absent_extra_took_is_left_out_and_the_models_own_stays() -> None:
    data, model = {"root": "x", "gone": 3, "off": None}, {"lr": 1.0, "off": False, "own": 4}
    config = {"data": data, "model": model, "gone": {"every_n_steps": 5}}
    kept, left_out = without_absent(config, {"data", "data.root", "model", "model.lr"})
    assert kept == {"data": {"root": "x"}, "model": {"lr": 1.0, "own": 4}}
    assert left_out == ["data.gone", "gone.every_n_steps"]


@pytest.mark.parametrize(
    "order",
    [
        "fit A B OPTIONS",
        "fit A OPTIONS B",
        "fit OPTIONS -c=a.yaml -c b.yaml",
        "eval OPTIONS A B",
    ],
)
def test_the_command_line_wins_over_every_file_and_the_last_file_over_those_before(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    a = {"model": {"lr": 0.1, "min_lr": 0.1}, "data": {"mixup": 0.1, "scale": [0.1, 1.0]}}
    b = {"model": {"min_lr": 0.2, "warmup_lr": 0.2}, "data": {"mixup": 0.2}, "seed_everything": 2}
    for name, content in {"a.yaml": a, "b.yaml": b, "logs/run/config.yaml": {"model": {"lr": 9.0}}}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(yaml.safe_dump(content))
    options = "--model.lr 0.3 --data.mixup=-0.0 --ckpt_path=x.ckpt"
    words = order.replace("OPTIONS", options).replace("A", "--config a.yaml").replace("B", "--config=b.yaml").split()
    with pytest.raises(SystemExit) as stop:
        main([*words, "--print_config"])
    assert stop.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    assert [config["model"][name] for name in ("lr", "min_lr", "warmup_lr")] == [0.3, 0.2, 0.2]
    assert (config["data"]["mixup"], config["data"]["scale"], config["seed_everything"]) == (0.0, [0.1, 1.0], 2)


def test_a_number_with_an_exponent_stays_one_and_text_that_looks_like_one_stays_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once the run's configuration is read, and written for the parser, as `cait resume` does."""
    config, text = tmp_path / "config.yaml", "5e089"
    given = {"run_name": text, "model": {"optimizer_args": {"eps": 1e-8}}}
    config.write_text(yaml.safe_dump(given).replace("1.0e-08", "1e-8"))
    found = resolved(REPO / "configs/digits.yaml", capsys, monkeypatch, "--config", str(config))
    assert found["run_name"] == text
    assert found["model"]["optimizer_args"] == given["model"]["optimizer_args"]
    assert load("[1e-8, '1e-8', 1.5e5, 1e, e5]", "here") == [1e-8, "1e-8", 1.5e5, "1e", "e5"]


def test_an_option_adds_to_the_list_of_a_file_that_comes_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {callbacks: [DeviceStatsMonitor]}")
    more = ["--trainer.callbacks+=ModelSummary", "--config", str(tmp_path / "a.yaml")]
    found = resolved(REPO / "configs/digits.yaml", capsys, monkeypatch, *more)["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in found] == ["DeviceStatsMonitor", "ModelSummary"]


def test_an_option_wins_over_the_file_of_a_group_that_comes_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("{max_epochs: 7, max_steps: 7}")
    more = ["--trainer.max_epochs=3", "--trainer", str(tmp_path / "a.yaml")]
    found = resolved(REPO / "configs/digits.yaml", capsys, monkeypatch, *more)["trainer"]
    assert (found["max_epochs"], found["max_steps"]) == (3, 7)


def test_xxs24_is_the_published_recipe(capsys, monkeypatch) -> None:
    config = resolved(REPO / "configs/imagenet/xxs24_224.yaml", capsys, monkeypatch)
    model, data, trainer = config["model"], config["data"], config["trainer"]
    assert (model["lr"], model["lr_base_size"], model["warmup_lr"], model["min_lr"]) == (5e-4, 512, 1e-6, 1e-5)
    assert (model["weight_decay"], model["warmup_epochs"], model["label_smoothing"]) == (0.05, 5, 0.1)
    assert (trainer["max_epochs"], trainer["precision"], trainer["gradient_clip_val"]) == (400, "bf16-mixed", None)
    assert (data["mixup"], data["cutmix"], data["mix_prob"], data["mix_switch_prob"]) == (0.8, 1.0, 1.0, 0.5)
    assert (data["auto_augment"], data["erase_prob"], data["repeats"]) == ("rand-m9-mstd0.5-inc1", 0.25, 3)
    assert (data["crop_pct"], data["interpolation"], data["img_size"]) == (1.0, "bicubic", 224)
    assert config["ema"]["decay"] == 0.99996
    assert trainer["use_distributed_sampler"] is False


def test_deit3_is_the_published_recipe(capsys, monkeypatch) -> None:
    """The command of README_revenge.md in facebookresearch/deit, for ViT-S, with main.py's defaults."""
    overlay = str(REPO / "configs/imagenet/deit3.yaml")
    config = resolved(RECIPE, capsys, monkeypatch, "--config", overlay, "--model.name=timm/deit3_small_patch16_224")
    model, data = config["model"], config["data"]
    assert (model["optimizer"], model["optimizer_args"], model["lr"], model["lr_base_size"]) == (
        "lamb",
        {"eps": 1e-8},
        4e-3,
        None,
    )
    assert (model["weight_decay"], model["warmup_epochs"], model["warmup_lr"], model["min_lr"]) == (0.05, 5, 1e-6, 1e-5)
    assert (model["loss"], model["label_smoothing"], config["trainer"]["max_epochs"]) == ("bce", 0.0, 800)
    assert (data["batch_size"], data["global_batch"], data["repeats"], data["erase_prob"]) == (2048, True, 3, 0.0)
    assert (data["auto_augment"], data["color_jitter"], data["mixup"], data["cutmix"]) == ("3a", 0.3, 0.8, 1.0)
    assert (data["scale"], data["crop_pct"]) == ([0.08, 1.0], 1.0)
    assert config["trainer"]["gradient_clip_val"] is None

"""Every YAML that is shipped parses, and what wins where several say something."""

import shutil
from pathlib import Path

import pytest
import yaml
from harness import DEVICES, REPO, Cait, call, rows, slow
from jsonargparse._loaders_dumpers import yaml_load

from cait.data.datamodule import ImageNetDataModule
from cait.guards import configurations
from cait.guards.configurations import is_overlay, without_absent
from cait.settings import flatten, nested

DIGITS = REPO / "configs/digits.yaml"
CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
OFTEN = [
    path
    for path in CONFIGS
    if path.parent.name not in ("trainer", "transfer") or path.stem in ("gpu", "cifar10")
]


def resolved(folder: Path, *words: str | Path) -> dict:
    """What a verb would use in the folder."""
    done = call(folder, *map(str, words), "--print_config")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.mark.parametrize(
    "path", [*OFTEN, *slow(*CONFIGS)], ids=lambda path: str(path.relative_to(REPO))
)
def test_every_config_parses_and_is_honoured(path: Path, tmp_path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    config = resolved(tmp_path, "fit", "--config", DIGITS, "--config", path)  # it may be an overlay
    for section, settings in given.items():  # model, data, trainer, ema, logger, logger_args
        if not isinstance(settings, dict):
            assert config[section] == settings
            continue
        for key, value in settings.items():
            found = config[section][key]
            # the parser adds the defaults of the class
            if isinstance(value, dict) and "init_args" in value:
                found = found | {
                    "init_args": {name: found["init_args"][name] for name in value["init_args"]}
                }
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
    data = ImageNetDataModule(
        **{key: settings[key] for key in ("auto_augment", "erase_prob", "hflip", "scale")}
    )
    steps = [
        type(step).__name__ for step in data.settings.train_transform(data.settings).transforms
    ]
    assert steps == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "MaybeToTensor",
        "Normalize",
    ]
    assert (settings["repeats"], settings["mixup"], settings["cutmix"]) == (1, 0.0, 0.0)


def test_an_overlay_says_neither_data_nor_model() -> None:
    assert is_overlay(Path("it.yaml"), {"logger": "wandb", "trainer": {"max_epochs": 2}})
    assert not is_overlay(Path("it.yaml"), {"model": {"lr": 1.0}})
    assert is_overlay(Path("trainer/it.yaml"), {"data": {"num_workers": 1}})


@pytest.mark.parametrize("value", ["1e-3", "12e4", "+1.5E7", 1e-3, 1e22, "1e", "e3", "2024"])
def test_a_name_like_a_number_stays_text(value: object) -> None:
    """As that of a run, or of its data, in config.yaml: YAML 1.1 takes it for text, and the parser for a number."""
    text = yaml.safe_dump({"it": value})
    assert configurations.load(text, "it") == yaml_load(text) == {"it": value}
    assert configurations.load("1e-3", "it") == 1e-3


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
    order: str, tmp_path: Path
) -> None:
    a = {"model": {"lr": 0.1, "min_lr": 0.1}, "data": {"mixup": 0.1, "scale": [0.1, 1.0]}}
    b = {"model": {"min_lr": 0.2, "warmup_lr": 0.2}, "data": {"mixup": 0.2}, "seed_everything": 2}
    for name, content in {
        "a.yaml": a,
        "b.yaml": b,
        "logs/run/config.yaml": {"model": {"lr": 9.0}},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(yaml.safe_dump(content))
    options = "--model.lr 0.3 --data.mixup=-0.0 --ckpt_path=x.ckpt"
    words = (
        order.replace("OPTIONS", options)
        .replace("A", "--config a.yaml")
        .replace("B", "--config=b.yaml")
        .split()
    )
    config = resolved(tmp_path, *words)
    assert [config["model"][name] for name in ("lr", "min_lr", "warmup_lr")] == [0.3, 0.2, 0.2]
    assert (config["data"]["mixup"], config["data"]["scale"], config["seed_everything"]) == (
        0.0,
        [0.1, 1.0],
        2,
    )


def test_an_option_adds_to_the_list_of_a_file_that_comes_after_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {callbacks: [DeviceStatsMonitor]}")
    more = ["--trainer.callbacks+=ModelSummary", "--config=a.yaml"]
    found = resolved(tmp_path, "fit", "--config", DIGITS, *more)["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in found] == [
        "DeviceStatsMonitor",
        "ModelSummary",
    ]


def test_an_option_wins_over_the_file_of_a_group_that_comes_after_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{max_epochs: 7, max_steps: 7}")
    found = resolved(
        tmp_path, "fit", "--config", DIGITS, "--trainer.max_epochs=3", "--trainer=a.yaml"
    )["trainer"]
    assert (found["max_epochs"], found["max_steps"]) == (3, 7)


def test_a_group_whose_lines_are_commented_out_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data:\n  # root: photos\nmodel: {lr: 1.0}\nrun_name:\n")
    assert configurations.settings(tmp_path / "mine.yaml") == {
        "model": {"lr": 1.0},
        "run_name": None,
    }


def test_what_is_flattened_is_nested_again_also_below_an_empty_group() -> None:
    settings = {
        "model": {"fields": {"depth": 2, "stem": None}, "lr": 0.1},
        "data": {"mean": [0.5]},
        "logger_args": {},
    }
    assert nested(flatten(settings)) == settings
    for nothing in (None, {}):  # as by `--model.fields null`, to which a recipe adds fields
        given = {"model.fields": nothing, "model.fields.depth": 2}
        assert nested(given) == {"model": {"fields": {"depth": 2}}}
        assert given["model.fields"] == nothing

"""Every YAML that is shipped parses, and what wins where several say something."""

import shutil
from pathlib import Path

import pytest
import yaml
from harness import DEVICES, REPO, Cait, call, rows, slow
from jsonargparse._loaders_dumpers import yaml_load

from cait import signature
from cait.cli.options import Line
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
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


@pytest.mark.parametrize("text", ["2024-01-31", "2024-01-31 12:30:00", "2024-01-31T12:30:00Z"])
def test_a_name_like_a_date_is_text_as_the_parser_takes_it(text: str) -> None:
    assert configurations.load(f"run_name: {text}", "it") == {"run_name": text}
    assert yaml_load(f"run_name: {text}") == {"run_name": text}


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


def names_in(value: object) -> object:
    """A list of classes by their names, with the arguments that the tests give them."""
    if isinstance(value, list):
        return [names_in(item) for item in value]
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    arguments = value.get("init_args", {})
    given = arguments.get("names") or arguments.get("save_dir")
    return [value["class_path"].rpartition(".")[2], given]


LOGGER = {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}
EVENTS = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "y"}}
NAMED = "from lightning.pytorch import Callback\n\n\nclass Named(Callback):\n"
NAMED += "    def __init__(self, names: list[str] | None = None) -> None: ...\n"
LAYERS = {
    "trainer.callbacks": [
        {"callbacks": ["ModelSummary"]},
        {"callbacks+": ["DeviceStatsMonitor"]},
        {"callbacks+": {"class_path": "named.Named", "init_args": {"names": ["a"]}}},
        {"callbacks+": "LearningRateMonitor"},
    ],
    "trainer.logger": [{"logger": LOGGER}, {"logger+": [EVENTS]}, {}, {"logger+": LOGGER}],
    "trainer.plugins": [
        {"plugins+": "TorchSyncBatchNorm"},
        {},
        {"plugins+": ["AsyncCheckpointIO"]},
    ],
    "data.augment_ops": [
        {"augment_ops+": ["a:b"]},
        {"augment_ops+": "c:d"},
        {},
        {"augment_ops+": ["e:f", "g:h"]},
    ],
}
"""Of each setting what one file after the other says; the last is typed."""
APPENDED = {
    "trainer.callbacks": [
        ["ModelSummary", None],
        ["DeviceStatsMonitor", None],
        ["Named", ["a"]],
        ["LearningRateMonitor", None],
    ],
    "trainer.logger": [["CSVLogger", "x"], ["TensorBoardLogger", "y"], ["CSVLogger", "x"]],
    "trainer.plugins": [["TorchSyncBatchNorm", None], ["AsyncCheckpointIO", None]],
    "data.augment_ops": ["a:b", "c:d", "e:f", "g:h"],
}


@pytest.mark.parametrize("beside", ["digits", "paper", "run"])
def test_a_plus_appends_to_what_the_layers_before_it_have(beside: str, tmp_path: Path) -> None:
    """Of files, of a group's own file, of the command line; beside a row of the paper, and to a run's own settings."""
    (tmp_path / "named.py").write_text(NAMED)
    run = tmp_path / "logs/mine"
    run.mkdir(parents=True)
    files: list[dict] = [{}, {}, {}, {}]
    for name, layers in LAYERS.items():
        group = name.partition(".")[0]
        for file, layer in zip(files, layers, strict=False):
            file[group] = file.get(group, {}) | layer
    for number, content in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(content))
    words = [f"--config={number}.yaml" for number in range(3)]
    words += [f"--trainer={files[3]['trainer']}", '--data={augment_ops+: ["e:f"]}']
    words += ["--data.augment_ops+=g:h"]
    start = {
        "digits": ["fit", "--config", str(DIGITS)],
        "paper": ["fit", "--paper", "table1/layerscale-12"],
        "run": ["resume", "mine"],
    }
    if beside == "run":
        text = yaml.safe_dump(configurations.settings(DIGITS) | files[0])
        (run / "config.yaml").write_text(signature.signed(text))
        words.pop(0)
    done = call(tmp_path, *start[beside], *words, "--print_config")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    config = flatten(yaml.safe_load(text[text.index("seed_everything") :]))
    assert {name: names_in(config[name]) for name in LAYERS} == APPENDED
    assert "left out" not in done.stderr


def test_a_file_may_append_to_a_list_within_a_class(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    for name, key in {"a": "names", "b": "names+"}.items():
        settings = {"class_path": "named.Named", "init_args": {key: [name]}}
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({"trainer": {"callbacks": [settings]}})
        )
    more = ["--config=a.yaml", "--config=b.yaml", "--trainer.callbacks.names+=c"]
    found = resolved(tmp_path, "fit", "--config", DIGITS, *more)["trainer"]["callbacks"]
    assert names_in(found) == [["Named", ["a", "b", "c"]]]


def test_what_a_later_layer_leaves_out_of_a_list_is_said(tmp_path: Path) -> None:
    for number, settings in enumerate(
        (
            {
                "trainer": {
                    "callbacks": ["ModelSummary", "ModelSummary"],
                    "plugins": "TorchSyncBatchNorm",
                }
            },
            {"trainer": {"callbacks": ["ModelSummary"]}, "model": {"metrics": {"a": "x:y"}}},
            {"trainer": {"plugins": "AsyncCheckpointIO"}, "model": {"metrics": {"b": "x:y"}}},
        )
    ):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(settings))
    words = [*(f"--config={number}.yaml" for number in range(3)), "--data.augment_ops=[a:b]"]
    done = call(tmp_path, "fit", "--config", str(DIGITS), *words, "--print_config")
    assert [line for line in done.stderr.splitlines() if "left out" in line] == [
        "left out of trainer.callbacks, which is given again: lightning.pytorch.callbacks.ModelSummary; "
        "trainer.callbacks+ would append",
        "left out of trainer.plugins, which is given again: lightning.pytorch.plugins.TorchSyncBatchNorm; "
        "trainer.plugins+ would append",
        "left out of model.metrics, which is given again: a",
    ]


def test_a_plus_names_the_setting_that_it_appends_to(tmp_path: Path) -> None:
    """Whoever asks what is given, or leaves out what scoring does not need, finds it."""
    file = tmp_path / "a.yaml"
    file.write_text("{data: {augment_ops+: [a:b]}, trainer: {callbacks+: {class_path: X}}}")
    line = Line("fit", [f"--config={file}"])
    given = line.sources.given({"data": {"augment_ops": ["a:b"], "root": "x"}})
    assert given == {"data.augment_ops": ["a:b"]}
    assert line.sources.last(["trainer.callbacks"]) == 0
    content = configurations.settings(file)
    assert configurations.without_classes(content)["trainer"] == {}
    assert without_absent(content, {"data", "trainer", "data.augment_ops"}) == (content, [])
    with pytest.raises(UserError, match="callbacks is there twice"):
        configurations.load("{callbacks: [A], callbacks+: [B]}", "it")


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

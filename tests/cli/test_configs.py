"""Every YAML that is shipped parses, and what wins where several say something."""

import shlex
import shutil

import pytest
import yaml
from harness import DEVICES, REPO, call, over_table, parsed, rows, slow, works

from cait.data.datamodule import ImageNetDataModule
from cait.settings import flatten

DIGITS = REPO / "configs/digits.yaml"
CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
OFTEN = [
    path
    for path in CONFIGS
    if path.parent.name not in ("trainer", "transfer") or path.stem in ("gpu", "cifar10")
]


def printed_config(folder, *words):
    """What a verb would use, and what it says on the side."""
    done = works(call(folder, *words, "--print_config"))
    text = done.stdout
    return yaml.safe_load(text[text.index("seed_everything") :]), done.stderr


def assert_shown(shown, expected):
    """The value of a setting; the parser adds the defaults of a class to its arguments."""
    if isinstance(expected, list):
        assert len(shown) == len(expected)
        for shown_item, expected_item in zip(shown, expected, strict=True):
            assert_shown(shown_item, expected_item)
    elif isinstance(expected, dict) and "class_path" in expected:
        assert shown["class_path"] == expected["class_path"]
        assert expected.get("init_args", {}).items() <= shown.get("init_args", {}).items()
    else:
        assert shown == expected


@pytest.mark.parametrize(
    "path", [*OFTEN, *slow(*CONFIGS)], ids=lambda path: str(path.relative_to(REPO))
)
def test_every_config_parses_and_is_honoured(path, tmp_path):
    # it may be an overlay
    shown, _ = printed_config(tmp_path, "fit", f"--config={DIGITS}", f"--config={path}")
    for name, value in parsed(path).items():
        settings = value if isinstance(value, dict) else {}
        for key, setting in settings.items():
            assert_shown(shown[name][key], setting)
        assert settings or shown[name] == value


@over_table(__file__, "layers", shows={}, tells=[])
def test_what_wins_where_several_say_something(words, files, shows, tells, tmp_path):
    shutil.copy(DIGITS, tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shown, told = printed_config(tmp_path, *shlex.split(words))
    for name, expected in shows.items():
        assert_shown(flatten(shown)[name], expected)
    assert [line for line in told.splitlines() if "left out" in line] == tells


def test_the_plain_file_has_nothing_of_the_recipe_and_trains(cait, tmp_path):
    """What it trains on is the crop, flipped or not, and nothing else; the learning rate is as given."""
    plain = REPO / "configs/base.yaml"
    fields = "--model.fields={embed_dim: 16, depth: 1, num_heads: 1, patch_size: 8}"
    brief = ["--trainer.max_steps=3", "--trainer.log_every_n_steps=1", "--model.warmup_epochs=0"]
    done = works(cait("fit", f"--config={plain}", *DEVICES, *brief, fields))
    assert "Warning" not in done.stderr
    # as packages in C++ say of what the garbage collector has not taken at the end
    assert "leaked" not in done.stderr
    run = tmp_path / "logs/base"
    lr = parsed(plain)["model"]["lr"]
    assert float(rows(run)[0]["lr"]) == pytest.approx(lr, rel=1e-6)
    settings = parsed(run / "config.yaml")["data"]
    assert (settings["repeats"], settings["mixup"], settings["cutmix"]) == (1, 0.0, 0.0)
    names = ("auto_augment", "erase_prob", "hflip", "scale")
    data = ImageNetDataModule(**{name: settings[name] for name in names})
    transform = data.settings.train_transform(data.settings)
    assert [type(step).__name__ for step in transform.transforms] == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "MaybeToTensor",
        "Normalize",
    ]

"""Every setting of `cait fit` changes what a run does, or a line refuses it: the rows of test_settings_used.yaml."""

import dataclasses
import functools
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
from harness import SMALL, beside, is_there
from modules import FIELDS, images_in, loader, module, trainer
from PIL import Image

from cait import plugins
from cait.cli.lightning import CaiTCLI
from cait.cli.options import Line, settings_of
from cait.data.datamodule import DataSettings
from cait.errors import UserError
from cait.guards.refusals import rules_of_run
from cait.model.config import CaiTConfig
from cait.run.program import Program
from cait.settings import Needs
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import ModuleSettings

TABLE = {name: row for name, row in beside(__file__).items() if is_there(row.get("needs"))}
MODEL = "model."
DATA = "data."
FIELD = "model.fields."
BUILT = ("img_size", "num_classes", "drop_path_rate")
"""Fields of the network that are settings beside them."""


def named(key):
    """The settings whose rows have this key."""
    return [name for name, row in TABLE.items() if key in row]


# What is seen of a module or a data module with these settings


def fitted(epochs, **settings):
    """A module that has been trained for so many epochs of three steps."""
    torch.manual_seed(0)
    network = module(**{"drop_path_rate": 0.5, "warmup_epochs": 1} | settings)
    images = loader(count=12, img_size=network.settings.img_size)
    fit = trainer(max_epochs=epochs, callbacks=[StepSeed(0)])
    fit.fit(network, images, images)
    return network, fit.callback_metrics


def trained(**settings):
    """The weights after training, and what validation counts."""
    network, scores = fitted(2, **settings)
    weights = {name: value.tolist() for name, value in network.state_dict().items()}
    return weights, {name: float(score) for name, score in scores.items()}


def built(**settings):
    """The shapes of the weights and what the network's parts hold, once a run is about to begin."""
    network = module(**{"drop_path_rate": 0.5} | settings)
    network.trainer = trainer(max_steps=1)
    network.trainer.state.fn = "fit"
    network.setup("fit")
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    parts = [
        {name: str(value) for name, value in vars(part).items() if not name.startswith("_")}
        for part in network.model.modules()
    ]
    return shapes, parts


PLAIN = dict(
    img_size=16, repeats=1, mixup=0, cutmix=0, auto_augment=None, erase_prob=0.0, hflip=0.0
)


def batches(**settings):
    """The images and labels of the first batches, which images train, and how they are read."""
    data = images_in(**PLAIN | settings)
    data.setup("fit")
    train = data.train_dataloader()
    images, labels = next(iter(train))
    tensors = [images, labels, *next(iter(data.val_dataloader()))]
    if data.settings.mixes:
        for seed in range(4):
            tensors += data.settings.mix(images.clone(), labels, data.num_classes, seed)
    return str(
        [
            *[tensor.tolist() for tensor in tensors],
            [key[1:] for batch in train.batch_sampler for key in batch],
            [data.source.train.name(index) for index in range(len(data.source.train))],
            [data.workers(1), data.settings.bad_allowed(1000), data.how_read(), data.class_names],
        ]
    )


SEEN = {each.__name__: each for each in (trained, built, batches)}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setenv("CAIT_RUN", "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


LABELS = """path,label
train/a/0.png,a
train/a/1.png,a
train/a/2.png,a
train/a/3.png,a
train/b/0.png,b
train/b/1.png,b
train/b/2.png,b
train/b/3.png,b
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory, photographs):
    """Folders of images that are transparent, turned and not square, tables of them, and weights, by name."""
    folder = tmp_path_factory.mktemp("files")
    exif = Image.Exif()
    exif[0x0112] = 6
    left = 0
    for root in ("IMAGES/train", "IMAGES/val", "OTHER/train", "OTHER/val", "FLAT"):
        for name, count in {"a": 8, "b": 4}.items():
            (folder / root / name).mkdir(parents=True)
            for number in range(count):
                left += 3
                picture = photographs[number % 2].crop((left, 90, left + 54, 126))
                picture.putalpha(128)
                picture.save(folder / root / name / f"{number}.png", exif=exif)
    (folder / "LIST").write_text("path,class\na/0.png,a\nb/1.png,b\n")
    (folder / "TABLE").write_text(LABELS)
    fit = trainer(max_steps=2, callbacks=[EMA(0.5)])
    fit.fit(module(lr=0.1, warmup_epochs=0), loader())
    fit.save_checkpoint(folder / "WEIGHTS.ckpt")
    return {path.stem: str(path) for path in folder.iterdir()}


def settings_with(name, files, added="other"):
    """The settings of the setting's group: those beside it, and its other value or what it is compared with."""
    row = TABLE[name]
    other = {name.rpartition(".")[2]: row["other"]}
    settings = row.get("beside", {}) | (row.get("against", {}) if added == "against" else other)
    for key, value in settings.items():
        if isinstance(value, str):
            settings[key] = files.get(value, value)
    if name.startswith(FIELD):
        return {"fields": FIELDS | settings}
    return {"root": files["IMAGES"]} | settings if name.startswith(DATA) else settings


@functools.cache
def seen_once(seen, settings):
    return SEEN[seen](**json.loads(settings))


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name].get("seen") in SEEN])
def test_a_setting_changes_what_is_trained(name, files):
    seen = TABLE[name]["seen"]
    without = settings_with(name, files, "against")
    assert SEEN[seen](**settings_with(name, files)) != seen_once(seen, json.dumps(without))


def test_what_is_seen_is_the_same_twice(files):
    images = files["IMAGES"]
    assert trained() == trained()
    assert built() == built()
    assert batches(root=images) == batches(root=images)


# What is seen of a run


class Planned(CaiTCLI):
    """A run that is put together, and not trained."""

    def fit(self, *_, **__):
        trainer = self.trainer
        self.seen = SimpleNamespace(
            trainer=trainer,
            module=self.model,
            data=self.datamodule,
            folder=Path(trainer.default_root_dir),
            callbacks={type(callback).__name__: callback for callback in trainer.callbacks},
            loggers={type(logger).__name__: logger for logger in trainer.loggers},
            names=str([type(each).__name__ for each in trainer.callbacks + trainer.loggers]),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            benchmark=torch.backends.cudnn.benchmark,
        )


@pytest.fixture
def run(digits_root, monkeypatch):
    def run(*words):
        settings = [*SMALL, f"--data.root={digits_root}", *words]
        monkeypatch.setattr(sys, "argv", ["cait", "fit", *settings])
        line = Line("fit", settings)
        line.extend(Program())
        return Planned(line, Program())

    return run


def at(path, seen):
    """What is at a path, as "callbacks.EMA.decay"; None where there is nothing. Objects count by their class."""
    for name in path.split("."):
        seen = seen.get(name) if isinstance(seen, dict) else getattr(seen, name, None)
    if isinstance(seen, dict):
        return [*seen]
    return seen if isinstance(seen, bool | int | float | str | type | None) else type(seen)


def word(name):
    """A setting with its other value, as it is typed."""
    value = TABLE[name]["other"]
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


OF_RUN = [name for name, row in TABLE.items() if row.get("seen", "trained") not in SEEN]


def test_a_setting_of_the_run_is_seen(run, files):
    """All at once, because each is seen in a place of its own."""
    names = [name for name in OF_RUN if "alone" not in TABLE[name]]
    before = run("--trainer.gradient_clip_val=1").seen
    earlier = {name: at(TABLE[name]["seen"], before) for name in names}
    after = run(*map(word, names), f"--model.weights={files['WEIGHTS']}").seen
    unseen = [name for name in names if at(TABLE[name]["seen"], after) == earlier[name]]
    assert unseen == []


@pytest.mark.parametrize("name", [name for name in OF_RUN if "alone" in TABLE[name]])
def test_a_setting_that_others_follow_is_seen(name, run):
    path = TABLE[name]["seen"]
    assert at(path, run(word(name)).seen) != at(path, run("--run_name=other").seen)


def begin(name, run, files):
    """Train, or put a run together, with a setting's other value."""
    if name.startswith(MODEL):
        fitted(1, **settings_with(name, files))
    else:
        run(word(name), *TABLE[name].get("with", "").split()).datamodule.setup("fit")


@pytest.mark.parametrize("name", named("refused"))
def test_a_setting_that_a_run_cannot_have_is_refused(name, run, files):
    with pytest.raises((UserError, OSError), match=re.escape(TABLE[name]["refused"])):
        begin(name, run, files)


@pytest.mark.parametrize("name", named("idle"))
def test_a_setting_without_what_it_needs_is_refused(name, run):
    with pytest.raises(UserError, match=f"--{name}( .*)? does nothing without"):
        run(word(name), *TABLE[name]["idle"].split())


def test_a_setting_that_a_later_one_leaves_without_use_is_named(run, caplog):
    run("--data.mixup=0", "--data.cutmix=0", "--model.name=own_parts:Net", "--model.fields=null")
    for name in ("data.mix_prob 0.2", "model.drop_path_rate 0.05"):
        assert f"left out: --{name} does nothing without" in caplog.text


# The table


def test_the_table_has_every_setting(run):
    settings = {*run()._parser("fit").get_defaults().keys()} - {"config"}
    kinds = (CaiTConfig, *plugins.groups("fields"))
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {*BUILT}
    inner = {"model.optimizer_args.lr", "model.optimizer_args.weight_decay"}
    assert {*TABLE} - inner == settings | {f"{FIELD}{name}" for name in fields}


def test_every_need_is_tried():
    rules = rules_of_run(settings_of("fit"))
    needing = {name for name in rules if any(isinstance(rule, Needs) for rule in rules[name])}
    assert needing
    assert needing <= {*named("idle"), *named("refused")}


# Numbers


KINDS = {
    ModuleSettings: module,
    DataSettings: partial(images_in, "nowhere"),
    CaiTConfig: CaiTConfig,
}
TAKEN = {("cache_gb", math.inf), ("layer_scale_init", -1.0)}
OTHERS = ("seed", "img_size", "num_classes", "mean", "std")


def numbers(kind):
    """Values that no number of this class's settings may have."""
    for name, hint in get_type_hints(kind).items():
        if name in OTHERS or "ClassVar" in str(hint):
            continue
        odd_values = [-1] if "int" in str(hint) else []
        if "float" in str(hint):
            odd_values = [math.nan, math.inf, -math.inf, -1.0]
        default = getattr(kind, name)
        for odd in odd_values:
            if (name, odd) not in TAKEN:
                yield name, [odd] * len(default) if isinstance(default, tuple | list) else odd


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_out_of_its_range_is_refused(kind):
    tried = [*numbers(kind)]
    assert len(tried) > 10
    for name, value in tried:
        with pytest.raises(UserError, match=name):
            pytest.fail(f"{name} {value}: {KINDS[kind](**{name: value})}")


@pytest.mark.parametrize("decay", [math.nan, math.inf, -1.0, 1.0])
def test_a_decay_out_of_its_range_is_refused(decay):
    with pytest.raises(UserError, match="decay"):
        EMA(decay)


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("value", [[math.nan] * 3, [1.0, math.inf, 1.0], [1.0] * 2, [1.0] * 4])
def test_a_mean_that_is_no_three_numbers_is_refused(name, value):
    with pytest.raises(UserError, match=f"{name} must be|three numbers each"):
        images_in("nowhere", **{name: value})

"""Every setting of `cait fit` changes what a run does, or a line refuses it: `pytest -s` prints which of the two.

A setting that the parser has and the tables below lack fails `test_the_tables_have_every_setting`.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from harness import SMALL
from lightning.pytorch import Callback, Trainer
from modules import images_in, loader, module, trainer
from PIL import Image

from cait import plugins
from cait.cli.lightning import CaiTCLI
from cait.cli.options import Line, settings_of
from cait.data.datamodule import DataSettings
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.guards.refusals import rules_of_run
from cait.model.config import CaiTConfig
from cait.run.checkpoints import BestCheckpoint, LastCheckpoint
from cait.run.program import Program
from cait.settings import Needs
from cait.train.callbacks import EMA
from cait.train.module import ModuleSettings

Settings = dict[str, Any]
Run = Callable[..., Any]
SEEDED = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(4, 7, generator=SEEDED), torch.tensor([0, 1, 2, 3])


# What is seen of a module or a data module with these settings


def network(**given: Any) -> Any:
    """The weights, and the answers to two images in training."""
    torch.manual_seed(0)
    made = module(**{"drop_path_rate": 0.0} | given)
    for weight in made.model.parameters():  # LayerScale starts near zero, and hides its branch
        torch.nn.init.normal_(weight, std=0.3) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1
        )
    size, channels = made.settings.img_size, (given.get("fields") or {}).get("in_chans", 3)
    answers = made.model(torch.rand(2, channels, size, size))
    parts = {type(part).__name__ for part in made.model.modules()}
    return (
        {key: [*value.shape] for key, value in made.state_dict().items()},
        answers.tolist(),
        parts,
    )


def fields(**given: Any) -> Any:
    """The same of fields of the network, and what its parts hold."""
    base, rate = (
        dict(embed_dim=16, depth=2, num_heads=2, patch_size=4),
        given.pop("drop_path_rate", 0.0),
    )
    made = module(fields=base | given, drop_path_rate=rate)
    drawn = [
        weight.flatten()[:4].tolist()
        for name, weight in made.model.named_parameters()
        if "gamma" in name
    ]
    held = [
        {k: str(v) for k, v in vars(p).items() if k[0] != "_" and k != "config"}
        for p in made.model.modules()
    ]
    return network(fields=base | given, drop_path_rate=rate), drawn, held


def blocks(**given: Any) -> Any:
    """How the blocks run once a fit has begun."""
    made = module(**given)
    fit = trainer(max_steps=1)
    made.trainer, fit.state.fn = fit, "fit"
    made.setup("fit")
    return [(str(block.run), made.model.grad_checkpointing) for block in made.model.blocks]


def start(**given: Any) -> Any:
    """The first weights, once those of a file are there."""
    made = module(**given)
    made.trainer = trainer()
    made.setup("validate")
    return made.model.head.weight.tolist()


def loss(**given: Any) -> Any:
    """The loss of the labels, with the teacher's part."""
    made = module(**given)
    judged, how = LOGITS.flip(1), made.settings
    of_labels = made.loss(LOGITS, LABELS)
    return float(how.distilled_loss(of_labels, LOGITS, judged) if how.distills else of_labels)


def rates(**given: Any) -> Any:
    """The rate of each step, and the groups of the optimizer."""
    seen: list[Any] = []

    class See(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    made = module(**{"warmup_epochs": 1} | given)
    fit = trainer(max_epochs=2, callbacks=[See()])
    fit.fit(made, loader(count=12))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in fit.optimizers[0].param_groups]
    return seen, str(groups), type(fit.optimizers[0]).__name__


def metrics(**given: Any) -> Any:
    """The names of what a validation counts."""
    made = module(**given)
    made.val_metrics.update(LOGITS, LABELS)
    return sorted(made.val_metrics.compute("val"))


def trains(**given: Any) -> Any:
    """Which weights train, and in which mode the parts are."""
    made = module(fields=None, name="timm/test_resnet", img_size=32, **given)
    [freeze] = [each for each in plugins.step_callbacks(made, None) if "Freeze" in str(each)]
    freeze.setup(trainer(), made, "fit")
    freeze.on_fit_start(trainer(), made)
    return [weight.requires_grad for weight in made.model.parameters()], len(freeze.held)


def batches(root: Path, **given: Any) -> Any:
    """The first batches of training and validation, mixed, and how they are loaded."""
    base: Settings = dict(
        img_size=16, repeats=1, mixup=0, cutmix=0, auto_augment=None, erase_prob=0.0, hflip=0.0
    )
    data = images_in(root, **base | given)
    data.setup("fit")
    [images, labels], (val, names) = (
        next(iter(data.train_dataloader())),
        next(iter(data.val_dataloader())),
    )
    if data.settings.mixes:
        mixed = [
            data.settings.mix(images.clone(), labels, data.num_classes, seed) for seed in range(4)
        ]
        images, labels = (torch.stack([pair[place] for pair in mixed]) for place in (0, 1))
    drawn = [key[1:] for batch in data.train_dataloader().batch_sampler for key in batch]
    about = (
        data.workers(1),
        data.settings.bad_allowed(1000),
        data.how_read(),
        len(data.source.train),
        data.class_names,
    )
    return images.tolist(), labels.tolist(), val.tolist(), names.tolist(), drawn, about


def opened(root: Path, **given: Any) -> Any:
    """The source of the images."""
    source = images_in(root, **given).source
    return type(source).__name__, str({name: str(value) for name, value in vars(source).items()})


def resumed(root: Path, **given: Any) -> Any:
    """Whether a run with other images goes on."""
    data = images_in(root, **given)
    data.setup("fit")
    data.trainer = trainer()
    data.trainer.state.fn, data.trainer.training = "fit", True
    state = data.state_dict()
    state["depends_on"]["training pictures"] += 1
    data.load_state_dict(state)


# name: (another value, what sees it, settings beside it), or the words of a refusal
MODEL: dict[str, tuple[Any, ...]] = {
    "name": ("s24", network, {"fields": {"depth": 1, "patch_size": 4}}),
    "drop_path_rate": (0.9, network),
    "fields": ({"depth": 1, "patch_size": 4}, network),
    "compile": (True, blocks),
    "grad_checkpointing": (True, blocks),
    "weights": ("FILE", start),
    "weights_ema": (False, start, {"weights": "FILE"}),
    "pretrained": (True, start, {}, "xxs24"),
    "loss": ("bce", loss),
    "label_smoothing": (0.3, loss),
    "class_weights": ("balanced", rates, {}, "class_weights counts the images of a data module"),
    "optimizer": ("sgd", rates),
    "optimizer_args": ({"betas": [0.5, 0.9]}, rates),
    "layer_decay": (0.5, rates),
    "weight_decay": (0.3, rates),
    "lr": (0.1, rates),
    "lr_base_size": (2, rates),
    "warmup_epochs": (0, rates),
    "warmup_lr": (0.001, rates),
    "schedule": ("constant", rates),
    "min_lr": (0.0004, rates),
    "metrics": ({"f1": "torchmetrics.classification:MulticlassF1Score"}, metrics),
    "per_class": (True, metrics),
    "distillation": ("hard", loss),
    "distillation_alpha": (0.1, loss, {"distillation": "soft"}),
    "distillation_tau": (3.0, loss, {"distillation": "soft"}),
    "teacher": (
        "nowhere.ckpt",
        blocks,
        {"distillation": "hard"},
        "the checkpoint nowhere.ckpt does not exist",
    ),
    "teacher_path": (
        "nowhere.pth",
        blocks,
        {"distillation": "hard", "teacher": "test_vit"},
        "from nowhere.pth",
    ),
    "teacher_fields": (
        {"x": 1},
        blocks,
        {"distillation": "hard", "teacher": "test_vit"},
        "cannot be loaded",
    ),
    "freeze": (True, trains),
    "freeze_norm": (True, trains),
}
FIELDS: Settings = {
    "patch_size": 8,
    "in_chans": 1,
    "stem": "conv",
    "embed_dim": 32,
    "depth": 3,
    "depth_token_only": 1,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "qkv_bias": False,
    "residual": "plain",
    "layer_scale_init": 0.5,
    "layer_scale_dist": "uniform",
    "layer_scale_token_only": False,
    "drop_path_mode": "mask",
    "talking_heads": False,
    "attention": "cosine",
    "attention_backend": "reference",
    "cls_in_keys": False,
    "class_token_at": 1,
    "global_pool": ("avg", {"depth_token_only": 0}, {"class_token_at": 1}),
    "norm": "batchnorm",
    "act": "leaky_relu",
}
DATA: dict[str, tuple[Any, ...]] = {
    "root": ("OTHER", batches),
    "train_split": ("val", batches),
    "val_split": ("train", batches),
    "val_fraction": (0.5, batches, {"root": "FLAT"}),
    "val_list": ("LIST", batches, {"root": "FLAT"}),
    "img_size": (8, batches),
    "interpolation": ("nearest", batches),
    "crop_pct": (0.5, batches),
    "fit": ("squash", batches),
    "mean": ([0.1, 0.2, 0.3], batches),
    "std": ([0.1, 0.2, 0.3], batches),
    "exif_orientation": (False, batches),
    "background": ("black", batches),
    "shrink": (8, batches),
    "reader": ("own_things:planes", batches),
    "reader_args": ({"x": 0.5}, batches, {"reader": "own_things:planes"}),
    "batch_size": (2, batches),
    "eval_batch_size": (2, batches),
    "backend": ("timm", batches),
    "repeats": (2, batches),
    "balance": ("full", batches),
    "num_workers": (1, batches),
    "max_bad_share": (0.5, batches),
    "scale": ((0.1, 0.2), batches),
    "ratio": ((3.0, 4.0), batches),
    "hflip": (1.0, batches),
    "auto_augment": ("3a", batches),
    "augment_ops": (["PIL.ImageOps:invert"], batches),
    "color_jitter": (0.9, batches),
    "erase_prob": (1.0, batches),
    "mixup": (0.8, batches),
    "cutmix": (1.0, batches),
    "mix_prob": (0.5, batches, {"mixup": 0.8}),
    "mix_switch_prob": (1.0, batches, {"mixup": 0.8, "cutmix": 1.0}),
    "mix_mode": ("elem", batches, {"mixup": 0.8}),
    "check_resume": (False, resumed),
    "class_names": (["a"], batches, {}, "class_names has 1 names"),
    "labels": ("TABLE", opened),
    "multi_label": (True, opened, {"labels": "TABLE"}),
    "folds": (3, opened),
    "fold": (1, opened, {"folds": 3}),
    "group_by": ("(.*)", opened),
}
BY_SOURCE = {
    "data_dir": "x",
    "download": True,
    "input_key": "x",
    "target_key": "x",
    "cache_gb": 1.0,
    "window": 2,
}
"""Settings of data sets of other kinds than folders: a folder refuses them."""


def part(kind: type) -> Callable[[Trainer], Any]:
    """What the run's callback of this kind holds."""

    def see(trainer: Any) -> Any:
        return [
            {
                key: value
                for key, value in vars(each).items()
                if isinstance(value, bool | int | float | str | None)
            }
            for each in trainer.callbacks
            if isinstance(each, kind)
        ]

    return see


def names(trainer: Any) -> list[str]:
    return [type(each).__name__ for each in [*trainer.callbacks, *trainer.loggers]]


ALL: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "seed_everything": (7, lambda t: t.datamodule_seen.seed),
    "data.global_batch": (False, lambda t: t.datamodule_seen.settings.global_batch),
    "model.solve_head": (True, names),
    "ema.decay": (0.5, part(EMA)),
    "module": ("own_classes:Module", lambda t: type(t.module_seen).__name__),
    "data_module": ("own_classes:Data", lambda t: type(t.datamodule_seen).__name__),
    "run_name": ("other", lambda t: Path(t.default_root_dir).name),
    "save_every_n_minutes": (3.0, part(LastCheckpoint)),
    "save_every_n_steps": (3, part(LastCheckpoint)),
    "max_nonfinite_steps": (3, part(NonFiniteGuard)),
    "best_metric": ("val/loss", part(BestCheckpoint)),
    "best_mode": ("min", part(BestCheckpoint)),
    "baselines": (True, names),
    "plan_minutes": (3.0, names),
    "logger": ("mlflow", names),
    "logger_args": ("{tracking_uri: sqlite:///x.db}", lambda _: Path("x.db").exists()),
    "trainer.precision": ("64", lambda t: t.precision),
    "trainer.callbacks": ("LearningRateMonitor", names),
    "trainer.max_epochs": (3, lambda t: t.max_epochs),
    "trainer.min_epochs": (2, lambda t: t.min_epochs),
    "trainer.max_steps": (9, lambda t: t.max_steps),
    "trainer.min_steps": (2, lambda t: t.min_steps),
    "trainer.max_time": ("00:00:01:00", names),
    "trainer.limit_train_batches": (0.5, lambda t: t.limit_train_batches),
    "trainer.limit_val_batches": (0.5, lambda t: t.limit_val_batches),
    "trainer.overfit_batches": (0.2, lambda t: t.overfit_batches),
    "trainer.val_check_interval": (0.5, lambda t: t.val_check_interval),
    "trainer.check_val_every_n_epoch": (2, lambda t: t.check_val_every_n_epoch),
    "trainer.num_sanity_val_steps": (0, lambda t: t.num_sanity_val_steps),
    "trainer.log_every_n_steps": (3, lambda t: t.log_every_n_steps),
    "trainer.enable_progress_bar": (False, names),
    "trainer.enable_model_summary": (False, names),
    "trainer.accumulate_grad_batches": (2, lambda t: t.accumulate_grad_batches),
    "trainer.gradient_clip_val": (0.5, lambda t: t.gradient_clip_val),
    "trainer.gradient_clip_algorithm": ("value", lambda t: t.gradient_clip_algorithm),
    "trainer.deterministic": (True, lambda t: torch.are_deterministic_algorithms_enabled()),
    "trainer.benchmark": (True, lambda t: torch.backends.cudnn.benchmark),
    "trainer.inference_mode": (False, lambda t: t.validate_loop.inference_mode),
    "trainer.profiler": ("simple", lambda t: type(t.profiler).__name__),
    "trainer.detect_anomaly": (True, lambda t: t._detect_anomaly),
    "trainer.reload_dataloaders_every_n_epochs": (1, lambda t: t.reload_dataloaders_every_n_epochs),
    "trainer.default_root_dir": ("elsewhere", lambda t: Path(t.default_root_dir).parent.name),
    "trainer.enable_autolog_hparams": (False, lambda t: t.enable_autolog_hparams),
}
ALONE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "trainer.enable_checkpointing": (False, names),
    "trainer.logger": (False, names),
    "trainer.plugins": ("DoublePrecision", lambda t: type(t.precision_plugin).__name__),
    "trainer.fast_dev_run": (True, lambda t: t.fast_dev_run),
}
REFUSED = {
    "trainer.accelerator": (
        "gpu",
        "no supported gpu backend found: take --trainer.accelerator auto",
    ),
    "trainer.strategy": ("ddp_spawn", "runs save and resume with ddp or one device"),
    "trainer.devices": ("3", "cannot be shared out over 3 batches"),
    "trainer.num_nodes": ("2", "start it on every machine with torchrun or srun"),
    "trainer.use_distributed_sampler": ("true", "the data module itself divides the images"),
    "trainer.limit_test_batches": ("3", "does nothing without a verb that tests"),
    "trainer.limit_predict_batches": ("3", "does nothing without a verb that tests"),
    "trainer.barebones": ("true", "barebones"),
    "trainer.model_registry": ("x", "does nothing without"),
    "trainer.sync_batchnorm": ("true", "sync_batchnorm"),
    "data.order": ("windowed", "is for shards"),
    "race": ("true", "--race is for a folder of images without a configuration"),
    "ckpt_path": ("nowhere.ckpt", "nowhere.ckpt"),
    "weights_only": ("false", "checkpoints hold plain values alone"),
    **{
        f"data.{name}": (str(value), "does nothing without a root of another kind")
        for name, value in BY_SOURCE.items()
    },
}
WITHOUT_USE = {
    "data.background": ["black", "--data.reader=cait.extras.channels.planes:read"],
    "data.mix_prob": ["0.5", "--data.mixup=0", "--data.cutmix=0"],
    "data.mix_switch_prob": ["0.1", "--data.mixup=0"],
    "data.mix_mode": ["pair", "--data.mixup=0", "--data.cutmix=0"],
    "data.color_jitter": ["0.3", "--data.auto_augment=rand-m9"],
    "data.val_fraction": ["0.3"],
    "model.distillation_alpha": ["0.1"],
    "model.distillation_tau": ["2", "--model.distillation=hard"],
    "model.teacher": ["x.ckpt"],
    "model.teacher_path": ["x.pth"],
    "model.teacher_fields": ["{x: 1}"],
    "model.weights_ema": ["true"],
    "model.warmup_lr": ["0.1", "--model.warmup_epochs=0"],
    "model.min_lr": ["1e-6", "--model.schedule=constant"],
    "model.label_smoothing": ["0.2", "--model.loss=torch.nn:CrossEntropyLoss"],
    "model.class_weights": ["balanced", "--model.loss=torch.nn:CrossEntropyLoss"],
    "model.optimizer_args.lr": ["0.1"],
    "model.optimizer_args.weight_decay": ["0.1"],
    "model.fields.layer_scale_init": ["0.1", "--model.fields.residual=plain"],
    "model.drop_path_rate": ["0.1", "--model.name=own_parts:Net", "--model.fields=null"],
    "model.freeze_norm": ["true"],
    "model.solve_head": ["true"],
    "trainer.gradient_clip_algorithm": ["value"],
    "trainer.min_epochs": ["4", "--trainer.max_epochs=3", "--trainer.max_time=00:01:00:00"],
    "trainer.min_steps": ["4"],
    "save_every_n_minutes": ["3", "--trainer.enable_checkpointing=false"],
    "save_every_n_steps": ["3", "--trainer.enable_checkpointing=false"],
    "best_metric": ["val/loss", "--trainer.limit_val_batches=0"],
    "best_mode": ["min", "--trainer.limit_val_batches=0"],
    "logger": ["mlflow", "--trainer.logger=false"],
    "logger_args": ["{x: 1}"],
}
"""The value of a setting, and the settings beside it that leave it without use."""
LISTED = {
    **{f"model.{name}": row[1].__doc__ for name, row in MODEL.items()},
    **{f"data.{name}": row[1].__doc__ for name, row in DATA.items()},
    **dict.fromkeys(ALL | ALONE, "The Trainer and its callbacks."),
    **{name: f"Refused: {words}" for name, (_, words) in REFUSED.items()},
}
LINKED = {"img_size", "num_classes"}
"""Fields of the network that are settings beside them."""


class Planned(CaiTCLI):
    """A run that is put together, and not trained."""

    def fit(self, *_: Any, **__: Any) -> None:
        vars(self.trainer)["datamodule_seen"] = self.datamodule
        vars(self.trainer)["module_seen"] = self.model


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setenv("CAIT_RUN", "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def run(digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*given: str) -> Any:
        words = ["fit", *SMALL, f"--data.root={digits_root}", *given]
        monkeypatch.setattr(sys, "argv", ["cait", *words])
        line = Line("fit", words[1:])
        line.extend(Program())
        return Planned(line, Program())

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of images that are transparent, turned and not square, another, one to divide, tables, and weights."""
    folder = tmp_path_factory.mktemp("files")
    draw = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for root in ("IMAGES/train", "IMAGES/val", "OTHER/train", "OTHER/val", "FLAT"):
        for kind, count in {"a": 8, "b": 4}.items():
            (folder / root / kind).mkdir(parents=True)
            for number in range(count):
                pixels = np.kron(draw.integers(0, 255, (6, 9, 4)), np.ones((6, 6, 1))).astype(
                    np.uint8
                )
                Image.fromarray(pixels).save(folder / root / kind / f"{number}.png", exif=exif)
    (folder / "LIST").write_text("path,class\na/0.png,a\nb/1.png,b\n")
    (folder / "TABLE").write_text(
        "path,label\n" + "".join(f"train/{k}/{n}.png,{k}\n" for k in "ab" for n in range(4))
    )
    fit = trainer(max_steps=2, callbacks=[EMA(0.5)])
    fit.fit(module(lr=0.1, warmup_epochs=0), loader())
    fit.save_checkpoint(folder / "FILE.ckpt")
    places = {name: str(folder / name) for name in ("OTHER", "FLAT", "LIST", "TABLE", "IMAGES")}
    return places | {"FILE": str(folder / "FILE.ckpt")}


def placed(settings: Settings, files: dict[str, str]) -> Settings:
    """The settings, with the paths of files in the place of their names."""
    return {
        name: files.get(value, value) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def assert_seen(name: str, row: tuple[Any, ...], files: dict[str, str], first: list[Any]) -> None:
    value, probe, beside, said = (*row, *({}, None)[len(row) - 2 :])
    beside = placed(beside, files)
    changed = partial(probe, *first, **beside | placed({name: value}, files))
    if said is not None:
        with pytest.raises(Exception, match=said):
            changed()
        return
    try:
        before = probe(*first, **beside)
    except UserError:  # refused without it
        changed()
        return
    assert changed() != before, name


@pytest.mark.parametrize("name", MODEL)
def test_a_setting_of_the_model_is_seen(name: str, files: dict[str, str]) -> None:
    assert_seen(name, MODEL[name], files, [])


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_network_is_seen(name: str) -> None:
    value = FIELDS[name]
    value, beside, before = value if isinstance(value, tuple) else (value, {}, {})
    beside |= {"drop_path_rate": 0.5} if name == "drop_path_mode" else {}
    assert fields(**beside | {name: value}) != fields(**before), name


@pytest.mark.parametrize("name", DATA)
def test_a_setting_of_the_data_is_seen(name: str, files: dict[str, str]) -> None:
    first = [] if DATA[name][2:] and "root" in DATA[name][2] else [files["IMAGES"]]
    value, probe, *rest = DATA[name]
    if name == "root":
        assert probe(files["OTHER"]) != probe(files["IMAGES"])
    elif not first:
        beside = placed(rest[0], files)
        assert_seen(name, (value, probe, beside), files, [beside.pop("root")])
    else:
        assert_seen(name, DATA[name], files, first)


def numbers(kind: Any) -> dict[str, list[Any]]:
    """Values that no number of this class's settings may have, by name; a list has three of them."""
    found: dict[str, list[Any]] = {}
    for name, hint in get_type_hints(kind).items():
        text = str(hint)
        if (
            name not in ("seed", "img_size", "num_classes")
            and "ClassVar" not in text
            and re.search("float|int", text)
        ):
            odd = [math.nan, math.inf, -math.inf, -1.0] if "float" in text else [-1]
            found[name] = (
                [(value,) * (2 if "tuple" in text else 3) for value in odd]
                if "Sequence" in text
                else odd
            )
            if "tuple" in text:
                found[name] = [(value, value) for value in odd]
    for name in ("mean", "std"):  # the next test has them
        found.pop(name, None)
    if "cache_gb" in found:  # which may have no limit
        found["cache_gb"].remove(math.inf)
    return found


MAKES: dict[Any, Callable[..., Any]] = {
    ModuleSettings: module,
    DataSettings: partial(images_in, "nowhere"),
    CaiTConfig: CaiTConfig,
    EMA.__init__: EMA,
}


@pytest.mark.parametrize("kind", MAKES)
def test_a_number_out_of_its_range_is_refused(kind: Any) -> None:
    known = numbers(kind)
    assert known
    for name, values in known.items():
        for value in values if name != "layer_scale_init" else values[:3]:
            with pytest.raises(UserError, match=r"must be|leaves|in_chans"):
                pytest.fail(f"{name} {value}: {MAKES[kind](**{name: value})}")


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("value", [(math.nan,) * 3, (1.0, math.inf, 1.0), (1.0, 1.0), (1.0,) * 4])
def test_a_mean_that_is_no_three_numbers_is_refused(name: str, value: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=f"{name} must be|three numbers each"):
        images_in("nowhere", **{name: value})


def words_of(settings: dict[str, tuple[Any, Any]]) -> list[str]:
    return [f"--{name}={value}" for name, (value, _) in settings.items()]


def test_a_setting_of_the_run_is_seen(run: Run, files: dict[str, str]) -> None:
    """All at once, because each is seen in a place of its own."""
    before = run("--data.global_batch=true", "--trainer.gradient_clip_val=1").trainer
    known = {name: see(before) for name, (_, see) in ALL.items()}
    after = run(*words_of(ALL), f"--model.weights={files['FILE']}").trainer
    for name, (_, see) in ALL.items():
        assert see(after) != known[name], name
    added = {"SolveHead", "Baselines", "LambdaCallback", "LearningRateMonitor", "Timer"}
    assert added <= {*names(after)} - {*known["logger"]}


@pytest.mark.parametrize("name", ALONE)
def test_a_setting_that_others_follow_is_seen(name: str, run: Run) -> None:
    value, see = ALONE[name]
    assert see(run(f"--{name}={value}").trainer) != see(run("--run_name=other").trainer)


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_a_run_cannot_have_is_refused(name: str, run: Run) -> None:
    value, words = REFUSED[name]
    with pytest.raises((UserError, OSError), match=re.escape(words)):
        run(f"--{name}={value}")


@pytest.mark.parametrize("name", WITHOUT_USE)
def test_a_setting_without_what_it_needs_is_refused(name: str, run: Run) -> None:
    value, *beside = WITHOUT_USE[name]
    with pytest.raises(UserError, match=r"does nothing without"):
        run(f"--{name}={value}", *beside)


def test_every_need_is_tried() -> None:
    rules = rules_of_run(settings_of("fit"))
    needs = {
        name for name, known in rules.items() if any(isinstance(rule, Needs) for rule in known)
    }
    assert needs
    assert needs <= WITHOUT_USE.keys() | REFUSED.keys()


def test_a_setting_that_a_later_one_leaves_without_use_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run("--data.mixup=0", "--data.cutmix=0", "--model.name=own_parts:Net", "--model.fields=null")
    for name in ("data.mix_prob 0.2", "model.drop_path_rate 0.05"):
        assert f"left out: --{name} does nothing without" in caplog.text


def test_the_tables_have_every_setting(run: Run) -> None:
    known = {*run()._parser("fit").get_defaults().keys()} - {"config"}
    assert known == LISTED.keys()
    fields = {
        field.name
        for kind in (CaiTConfig, *plugins.groups("fields"))
        for field in dataclasses.fields(kind)
    }
    assert fields == {*FIELDS, *LINKED, "drop_path_rate"}
    for name in sorted(known):
        print(f"{name:40} {LISTED[name]}")

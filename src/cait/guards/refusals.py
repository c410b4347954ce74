"""Errors of jsonargparse, Lightning and torch in one line, and settings with which a run cannot save and resume."""

import contextlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cait import plugins
from cait.data.folder import FolderSource
from cait.errors import DISK_FULL, UserError, did_you_mean, of_own_line, of_system, one_line, said
from cait.guards import configurations
from cait.references import is_path
from cait.run.rundir import BEST, LAST, PREVIOUS
from cait.settings import check_range, flatten, is_in
from cait.train.metrics import best_mode

REPEATED = ("Does not validate", "Subtypes:", "Errors:", "Given value type:", "Expected a <class 'NoneType'>")
MOST = 100
"""Letters of a line: the value may be an object with all its settings."""
REPLACED = {
    "BaseFinetuning": "the optimizer's groups stay as they are in a run; take --model.freeze",
    "BatchSizeFinder": "find the batch before the run (docs/your_script.md), and give it as --data.batch_size",
    "LearningRateFinder": "find the rate before the run (docs/your_script.md), and give it as --model.lr",
    "ModelPruning": "a run cannot be resumed with it; prune the network that has been trained",
    "SpikeDetection": "a run cannot be resumed with it; --max_nonfinite_steps ends a run without finite gradients",
    "StochasticWeightAveraging": "no checkpoint would hold its average; take --ema.decay",
    "Timer": "take --trainer.max_time",
    "WeightAveraging": "checkpoints would hold its average in place of the weights; take --ema.decay",
}
"""Callbacks of Lightning that do not fit a run which saves, stops and resumes at any step, and what to do instead."""

SCALED, IMAGES = (None, "layerscale", "scalar"), "data.root data.val_list data.labels data.folds"
NEEDS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "data.mix_prob data.mix_mode": ("Mixup or CutMix", "data.mixup data.cutmix", lambda *of: not any(of)),
    "data.mix_switch_prob": ("both Mixup and CutMix", "data.mixup data.cutmix", lambda *of: not all(of)),
    "data.color_jitter": ("auto_augment 3a or null", "data.auto_augment", lambda of: of and not of.startswith("3a")),
    "data.background": ("images in RGB, and data.reader reads planes", "data.reader", bool),
    "model.distillation_alpha model.teacher": ("distillation", "model.distillation", lambda of: of == "none"),
    "model.distillation_tau": ("distillation soft", "model.distillation", lambda of: of != "soft"),
    "model.teacher_path model.teacher_fields": (
        "distillation from a teacher of timm's",
        "model.distillation model.teacher",
        lambda how, teacher: how == "none" or teacher.endswith(".ckpt"),
    ),
    "model.weights_ema": ("--model.weights", "model.weights", lambda of: not of),
    "model.warmup_lr": ("a warm-up", "model.warmup_epochs", lambda of: not of),
    "model.min_lr": ("--model.schedule cosine", "model.schedule", lambda of: of != "cosine"),
    "model.label_smoothing model.class_weights": ("loss cross_entropy or bce", "model.loss", is_path),
    "model.fields.layer_scale_init": ("LayerScale", "model.fields.residual", lambda of: of not in SCALED),
    "trainer.min_epochs": ("more epochs", "trainer.max_epochs trainer.min_epochs", lambda m, n: m and n and 0 < m < n),
    "trainer.gradient_clip_algorithm": ("a gradient_clip_val", "trainer.gradient_clip_val", lambda of: not of),
    "save_every_n_minutes save_every_n_steps": ("checkpoints", "trainer.enable_checkpointing", lambda of: of is False),
    "best_metric best_mode": (
        "validation",
        "trainer.limit_val_batches best_metric",
        lambda share, metric: share == 0 and (metric or "val").startswith("val"),
    ),
    "model.optimizer_args.lr model.optimizer_args.weight_decay": ("its place beside optimizer", "", lambda: True),
    "trainer.limit_test_batches trainer.limit_predict_batches": ("a verb that tests", "", lambda: True),
    "trainer.model_registry": ("Lightning's own checkpoints", "", lambda: True),
}
"""Settings that do nothing without others: what they need in words, the others, and whether their values lack it."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors about settings that Lightning or jsonargparse refuses into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        is_lightnings = Path(lightning.__file__).parent in Path(last.filename).parents
        if "class_path" in str(error):  # jsonargparse's, about a class that cannot be made
            raise UserError(said(own[0]) if (own := of_own_line(error)) else _shortened(str(error))) from error
        if is_lightnings or isinstance(error, MisconfigurationException):
            raise of_system(error) or UserError(one_line(error)) from error
        raise


def tell_of_threads(given: threading.ExceptHookArgs) -> None:
    """Hide the traceback of TensorBoard's writing thread: the run itself reports a full disk in one line."""
    if not (isinstance(given.exc_value, OSError) and given.exc_value.errno in DISK_FULL):
        threading.__excepthook__(given)


def in_restoring(error: BaseException) -> str:
    """What an error says that arose while Lightning put a checkpoint's states back; empty for any other."""
    calls = traceback.extract_tb(error.__traceback__)
    restoring = any(call.filename.endswith("checkpoint_connector.py") and "restore" in call.name for call in calls)
    if isinstance(error, UserError | OSError) or not isinstance(error, Exception) or not restoring:
        return ""
    return f"{type(error).__name__}: {one_line(error)}"


def explain(message: str, verb: str, known: list[str]) -> str:
    """jsonargparse's message of many lines in one. `known` has every setting of the verb, as "model.lr"."""
    if found := re.search(r"(?:unrecognized arguments: -*|does not accept option ')([^\s=']+)", message):
        last, options = f".{found[1].replace('-', '_')}", [f"--{name}" for name in known]
        same = " or ".join(option for option in options if option.endswith(last))
        near = did_you_mean(f"--{found[1]}", options, f"; `cait {verb} --help=all` lists what there is")
        return f"there is no setting {found[1]}{f'; did you mean {same}?' if same else near}"
    if found := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', message):
        return f"{found[1]} cannot be set: {configurations.LINKED.get(found[1], 'it follows another setting')}"
    return re.sub(r'^Parser key "(.+?)":', r"--\1:", _shortened(message))


def _shortened(message: str) -> str:
    """What jsonargparse says of a value, without the types that it lists a second time."""
    lines = [line.strip(" -") for line in message.splitlines()]
    told = [line[:MOST] for line in lines if line and not line.startswith(REPEATED)]
    return "; ".join(dict.fromkeys(told)).replace(":; ", ": ")


def check_settings(given: Any) -> None:
    """Refuse settings of the Trainer, as the command line has them, that Lightning accepts and a run cannot have."""
    for name in ("max_epochs", "max_steps", "limit_train_batches", "val_check_interval", "check_val_every_n_epoch"):
        if given[name] == 0:
            raise UserError(f"--trainer.{name} 0: a run cannot train with it")
    check_range(given, "[1, inf)", "accumulate_grad_batches")
    check_range(given, "[0, inf)", "gradient_clip_val")  # below 0 it would turn gradients
    interval = given.val_check_interval
    if not isinstance(interval, int | float | None):  # each process would go by its own clock, and a resumed run too
        raise UserError(f"--trainer.val_check_interval counts batches or a share of an epoch, not time: {interval}")
    if "://" in str(given.default_root_dir):
        raise UserError(f"--trainer.default_root_dir {given.default_root_dir}: a run is on a disk; copy it from there")
    if given.use_distributed_sampler:
        raise UserError("--trainer.use_distributed_sampler true: the data module itself divides the images")


class Given:
    """The settings of a new run as they are given, to refuse those that would do nothing.

    One that a later file or word has left without what it needs is named and left out: a recipe may have set it.
    """

    def __init__(self, config: Any, defaults: Any, sources: list[Iterable[str]]) -> None:
        self.sources = sources
        """The names of the settings that each layer of the command line gives, and last its words."""
        self.data = config.data.as_dict()
        self.held, self.defaults = flatten(config.as_dict()), flatten(defaults.as_dict())

    def check(self) -> None:
        """Raise UserError if a setting lacks what it needs, by `NEEDS`."""
        for names, (needed, others, is_lacking) in NEEDS.items():
            if is_lacking(*map(self.held.get, others.split())):
                self.unused(names, others, needed)

    def unused(self, names: str, others: str, needed: str) -> None:
        """Raise UserError if one of these settings is given, no earlier than the `others` that leave it without use."""
        for name in names.split():
            parts = {key: value for key, value in self.held.items() if key.startswith(f"{name}.")}
            value = self.held.get(name, parts)
            if not value or value == self.defaults.get(name):  # off, or as if it were not given
                continue
            told = f"--{name} {value} does nothing without {needed}"
            if self._last(name) >= self._last(others):
                raise UserError(f"{told}: leave it out")
            rank_zero_info(f"left out: {told}")

    def _last(self, names: str) -> int:
        """The place of the last source that gives one of these settings, or a part or the whole of it; -1 for none."""
        wanted = names.split()

        def concerns(key: str) -> bool:
            return is_in(key, wanted) or any(is_in(name, [key]) for name in wanted)

        return max((at for at, held in enumerate(self.sources) if any(map(concerns, held))), default=-1)

    def check_made(self, network: Any, source: Any, strategy: Any) -> None:
        """Raise UserError if a setting is of no use for the network, the source of the images or the processes."""
        if isinstance(strategy, SingleDeviceStrategy):
            self.unused("trainer.sync_batchnorm", "trainer.devices trainer.strategy", "several processes")
        if getattr(network, "takes_no_drop_path_rate", False):
            self.unused("model.drop_path_rate", "model.name", "a network that takes it")
        for name in getattr(source, "without_use", FolderSource.divided_by):
            self.unused(f"data.{name}", IMAGES, "images that it divides")
        for name in plugins.without_use(self.data["root"], self.data):
            self.unused(f"data.{name}", IMAGES, f"a root of another kind than {self.data['root']}")


def check_callbacks(trainer: Any, metrics: Mapping[str, str]) -> None:
    """Refuse the callbacks of `REPLACED` and their subclasses, as configurations name them, before they are made.

    Refuse also to look for the smallest value, which is Lightning's default, of a metric whose largest is the best, or
    for one of validation without it. `trainer` has the Trainer's settings, `metrics` are the user's own.
    """
    named = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    for callback in (callback for callback in named if hasattr(callback, "class_path")):
        module, _, name = callback.class_path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        for base in getattr(kind, "__mro__", ()):  # it may be a function
            if base.__module__.startswith("lightning.") and base.__name__ in REPLACED:
                raise UserError(f"--trainer.callbacks {name}: {REPLACED[base.__name__]}")
        settings = callback.get("init_args") or {}
        place, files = settings.get("dirpath"), {f"{settings.get('filename')}.ckpt"}
        files |= {LAST} if settings.get("save_last") else set()
        if "://" in str(place):
            raise UserError(f"--trainer.callbacks {name}: checkpoints are written to a disk, not to {place}")
        if not place and (own := {LAST, PREVIOUS, BEST} & files):
            raise UserError(f"--trainer.callbacks {name}: the run itself writes {min(own)}, give another filename")
        metric, mode = str(settings.get("monitor")), settings.get("mode")
        if metric.startswith("val") and trainer.limit_val_batches == 0:
            raise UserError(f"--trainer.callbacks {name}: --trainer.limit_val_batches 0 leaves no {metric}")
        if mode == "min" and best_mode(metric, metrics) == "max":
            raise UserError(f"--trainer.callbacks {name}: the largest {metric} is the best, give it mode max")


def check_rates(schedule: Any, images: int) -> None:
    """Refuse a least learning rate above the highest one, for steps of so many images."""
    peak = schedule.lr * max(1, images / (schedule.lr_base_size or images))
    if schedule.schedule != "constant" and schedule.min_lr > peak:
        raise UserError(f"--model.min_lr {schedule.min_lr:g} is above --model.lr {schedule.lr:g}; lower it")


def check_strategy(trainer: Trainer, given: Any) -> None:
    """Refuse a strategy that cannot save and resume a run, and settings that one's own method `check` refuses."""
    strategy = trainer.strategy
    if hasattr(strategy, "check"):
        strategy.check(trainer.precision, bool(given.sync_batchnorm))
    elif type(strategy) not in (SingleDeviceStrategy, DDPStrategy) or "spawn" in str(given.strategy):
        name = type(strategy).__name__
        raise UserError(f"--trainer.strategy: runs save and resume with ddp or one device, not {name}")


def check_processes(trainer: Trainer, started: int) -> None:
    """Refuse a run that does not have the processes that the user asked for, where a launcher has `started` so many."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(cluster, LightningEnvironment) and not os.getenv("MASTER_ADDR"):
        raise UserError(f"--trainer.num_nodes {trainer.num_nodes}: start it on every machine with torchrun or srun")
    asked = trainer.num_devices * trainer.num_nodes
    for have in (started if started > 1 else asked, trainer.world_size):  # Lightning would train on as many as these
        if have != asked:
            ways = "give both as 1 to torchrun; under SLURM take srun, or unset SLURM_NTASKS"
            raise UserError(f"--trainer.devices and num_nodes make {asked} processes, {have} were started: {ways}")

"""Errors of jsonargparse, Lightning and torch in one line, and settings with which a run cannot save and resume."""

from __future__ import annotations

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
from cait.errors import DISK_FULL, UserError, did_you_mean, kind_and_place, of_own_line, one_line
from cait.guards import configurations
from cait.references import is_path
from cait.settings import flatten
from cait.train.metrics import best_mode

IN_WORDS = {
    "No supported gpu backend found!": "--trainer.accelerator gpu: this machine has no GPU that PyTorch can use; take "
    "auto or cpu, and look at what nvidia-smi says",
    "SyncBatchNorm layers only work with GPU": "--trainer.sync_batchnorm true needs GPUs: leave it out on CPUs",
    "parameters that were not used in producing the loss": "the network has parameters that the loss does not reach, "
    "which DDP waits for: freeze them, or add --trainer.strategy ddp_find_unused_parameters_true",
}
"""A part of what Lightning says, and what a user needs to know instead."""
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

Of = Callable[[str], Any]
NEEDS: dict[str, tuple[str, Callable[[Of], Any]]] = {
    "data.mix_prob data.mix_mode": ("Mixup or CutMix", lambda of: of("data.mixup") or of("data.cutmix")),
    "data.mix_switch_prob": ("both Mixup and CutMix", lambda of: of("data.mixup") and of("data.cutmix")),
    "data.color_jitter": ("auto_augment 3a or null", lambda of: (of("data.auto_augment") or "3a").startswith("3a")),
    "model.distillation_alpha model.teacher": ("distillation", lambda of: of("model.distillation") != "none"),
    "model.distillation_tau": ("distillation soft", lambda of: of("model.distillation") == "soft"),
    "model.teacher_path model.teacher_fields": (
        "distillation from a teacher of timm's",
        lambda of: of("model.distillation") != "none" and not of("model.teacher").endswith(".ckpt"),
    ),
    "model.weights_ema": ("--model.weights", lambda of: of("model.weights")),
    "model.warmup_lr": ("a warm-up", lambda of: of("model.warmup_epochs")),
    "model.min_lr": ("--model.schedule cosine", lambda of: of("model.schedule") == "cosine"),
    "model.label_smoothing": ("loss cross_entropy or bce", lambda of: not is_path(of("model.loss"))),
    "model.fields.layer_scale_init": (
        "residual layerscale or scalar",
        lambda of: of("model.fields.residual") in (None, "layerscale", "scalar"),
    ),
    "trainer.gradient_clip_algorithm": ("a gradient_clip_val", lambda of: of("trainer.gradient_clip_val")),
    "save_every_n_minutes save_every_n_steps": (
        "checkpoints",
        lambda of: of("trainer.enable_checkpointing") is not False,
    ),
    "model.optimizer_args.lr model.optimizer_args.weight_decay": ("its place beside model.optimizer", lambda _: False),
    "trainer.limit_test_batches trainer.limit_predict_batches": ("a verb that tests", lambda _: False),
    "trainer.model_registry": ("Lightning's own checkpoints", lambda _: False),
}
"""Settings that do nothing without others: what they need in words, and whether it is there, by the others' values."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors about settings that Lightning refuses, and about too little memory, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        if re.search(r"out of memory|can't allocate memory", str(error)):
            remedy = "lower --data.batch_size or --data.img_size, or add --model.grad_checkpointing true"
            raise UserError(f"out of memory: {remedy}") from error
        words = next((words for said, words in IN_WORDS.items() if said in str(error)), None)
        if "class_path" in str(error):  # jsonargparse's, about a class that cannot be made
            words = kind_and_place(error) if of_own_line(error) else _shortened(str(error))
        *_, last = traceback.extract_tb(error.__traceback__)
        is_lightnings = Path(lightning.__file__).parent in Path(last.filename).parents
        if words or is_lightnings or isinstance(error, MisconfigurationException):
            raise UserError(words or one_line(error)) from error
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


def explain(message: str, verb: str, arguments: list[str], known: list[str]) -> str:
    """jsonargparse's message of many lines in one. `known` has every setting of the verb, as "model.lr"."""
    if found := re.search(r"(?:unrecognized arguments: -*|does not accept option ')([^\s=']+)", message):
        return f"{_file_with(found[1], arguments)}there is no setting {found[1]}{_hint(found[1], verb, known)}"
    if found := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', message):
        return f"{found[1]} cannot be set: {configurations.LINKED.get(found[1], 'it follows another setting')}"
    if found := re.match(r'Parser key "(.+?)":', message):
        return f"{_file_with(found[1], arguments, message)}--{found[1]}: {_shortened(message[found.end() :])}"
    return one_line(message)


def _shortened(message: str) -> str:
    """What jsonargparse says of a value, without the types that it lists a second time."""
    lines = [line.strip(" -") for line in message.splitlines()]
    told = [line[:MOST] for line in lines if line and not line.startswith(REPEATED)]
    return "; ".join(told).replace(":; ", ": ")


def _hint(word: str, verb: str, known: list[str]) -> str:
    """The end of a message about an unknown setting: what has its last part, or is alike."""
    last = f".{word.replace('-', '_')}"
    if same := [f"--{name}" for name in known if name.endswith(last)]:
        return f"; did you mean {' or '.join(same)}?"
    options = [f"--{name}" for name in known]
    return did_you_mean(f"--{word}", options, f"; `cait {verb} --help=all` lists what there is")


def _file_with(key: str, arguments: list[str], message: str = "") -> str:
    """The last configuration that sets the key, if any to the value in the message, as "mine.yaml: ".

    Empty if an option sets it, or none.
    """

    def is_among(names: Iterable[str]) -> bool:
        return any(f"{name.rstrip('+')}.".startswith(f"{key}.") for name in names)

    files = reversed(configurations.config_files(arguments))
    held = {file: found for file in files if is_among(found := flatten(configurations.settings(file)))}
    if not held or is_among(name for name, _ in configurations.options(arguments)):
        return ""
    return f"{max(held, key=lambda file: message.endswith(f'value: {held[file].get(key)}'))}: "


def check_settings(given: Any) -> None:
    """Refuse settings of the Trainer, as the command line has them, that Lightning accepts and a run cannot have."""
    for name in ("max_epochs", "max_steps", "limit_train_batches", "val_check_interval", "check_val_every_n_epoch"):
        if given[name] == 0:
            raise UserError(f"--trainer.{name} 0: a run cannot train with it")
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0)):  # below 0 it would turn gradients
        if (given[name] or 0) < least:
            raise UserError(f"--trainer.{name} must be at least {least}, got {given[name]}")
    interval = given.val_check_interval
    if not isinstance(interval, int | float | None):  # each process would go by its own clock, and a resumed run too
        raise UserError(f"--trainer.val_check_interval counts batches or a share of an epoch, not time: {interval}")
    if given.use_distributed_sampler:
        raise UserError("--trainer.use_distributed_sampler true: the data module itself divides the images")


class Given:
    """The settings of a new run as they are given, to refuse those that would do nothing.

    One that a later file or word has left without what it needs is named and left out: a recipe may have set it.
    """

    def __init__(self, config: Any, defaults: Any, arguments: list[str]) -> None:
        files = [flatten(configurations.settings(path)) for path in configurations.config_files(arguments)]
        words = [arguments, sys.argv[1:]]  # an extra adds words to those that were typed
        self.sources = [*files, *(dict(configurations.options(each)) for each in words)]
        self.held, self.defaults = flatten(config.as_dict()), flatten(defaults.as_dict())

    def check(self) -> None:
        """Raise UserError if a setting lacks what it needs, by `NEEDS`."""
        for names, (needed, is_there) in NEEDS.items():
            others = list[str]()

            def of(name: str, asked: list[str] = others) -> Any:
                asked.append(name)
                return self.held.get(name)

            if not is_there(of):
                self.unused(names.split(), others, needed)

    def unused(self, names: Iterable[str], others: Iterable[str], needed: str) -> None:
        """Raise UserError if one of these settings is given, no earlier than the `others` that leave it without use."""
        for name in names:
            parts = {key: value for key, value in self.held.items() if key.startswith(f"{name}.")}
            value = self.held.get(name, parts)
            if not value or value == self.defaults.get(name):  # off, or as if it were not given
                continue
            told = f"--{name} {value} does nothing without {needed}"
            if self._last([name]) >= self._last(others):
                raise UserError(f"{told}: leave it out")
            rank_zero_info(f"left out: {told}")

    def _last(self, names: Iterable[str]) -> int:
        """The place of the last source that gives one of these settings, or a part or the whole of it; -1 for none."""

        def is_given(held: Iterable[str]) -> bool:
            return any(
                f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in names for key in held
            )

        return max((place for place, held in enumerate(self.sources) if is_given(held)), default=-1)

    def check_made(self, network: Any, source: Any, strategy: Any) -> None:
        """Raise UserError if a setting is of no use for the network, the source of the images or the processes."""
        if isinstance(strategy, SingleDeviceStrategy):
            self.unused(["trainer.sync_batchnorm"], ["trainer.devices", "trainer.strategy"], "several processes")
        if getattr(network, "takes_no_drop_path_rate", False):
            self.unused(
                ["model.drop_path_rate"], ["model.name"], f"a network that takes it, as {self.held['model.name']}"
            )
        others, divides = ["data.root", "data.val_list"], getattr(source, "holds_out", False)
        if not divides or self.held["data.val_list"]:
            self.unused(
                ["data.val_fraction"], others, "a --data.root that has no validation images, nor a list of them"
            )
        if not divides:
            self.unused(["data.val_list"], others, "a root of class folders alone")
        settings = {name.removeprefix("data."): value for name, value in self.held.items() if name.startswith("data.")}
        unused = [f"data.{name}" for name in plugins.without_use(self.held["data.root"], settings)]
        self.unused(unused, others, f"a root of another kind than {self.held['data.root']}")


def check_callbacks(given: Any, metrics: Mapping[str, str]) -> None:
    """Refuse the callbacks of `REPLACED` and their subclasses, as configurations name them, before they are made.

    Refuse also to look for the smallest value, which is Lightning's default, of a metric whose largest is the best.
    `metrics` are the user's own.
    """
    named = given if isinstance(given, list) else [given]
    for callback in (callback for callback in named if hasattr(callback, "class_path")):
        module, _, name = callback.class_path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        for base in getattr(kind, "__mro__", ()):  # it may be a function
            if base.__module__.startswith("lightning.") and base.__name__ in REPLACED:
                raise UserError(f"--trainer.callbacks {name}: {REPLACED[base.__name__]}")
        settings = callback.get("init_args") or {}
        metric, mode = settings.get("monitor"), settings.get("mode")
        if isinstance(metric, str) and mode == "min" and best_mode(metric, metrics) == "max":
            raise UserError(f"--trainer.callbacks {name}: the largest {metric} is the best, give it mode max")


def check_rates(schedule: Any, images: int) -> None:
    """Refuse a least learning rate above the highest one, for steps of so many images."""
    scaled = schedule.lr * images / (schedule.lr_base_size or images)
    peak = max(schedule.lr, scaled)
    if schedule.schedule != "constant" and schedule.min_lr > peak:
        raise UserError(f"--model.min_lr {schedule.min_lr:g} is above --model.lr {schedule.lr:g}; lower it")


def check_strategy(trainer: Trainer, given: Any) -> None:
    """Refuse a strategy that cannot save and resume a run, and settings that one's own method `check` refuses."""
    strategy = trainer.strategy
    if hasattr(strategy, "check"):
        strategy.check(trainer.precision, bool(given.sync_batchnorm))
    elif type(strategy) not in (SingleDeviceStrategy, DDPStrategy) or given.strategy == "ddp_spawn":
        name = type(strategy).__name__
        raise UserError(f"--trainer.strategy: runs save and resume with ddp or one device, not {name}")


def check_processes(trainer: Trainer, started: int) -> None:
    """Refuse a run that does not have the processes that the user asked for, where a launcher has `started` so many."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(cluster, LightningEnvironment) and not os.getenv("MASTER_ADDR"):
        raise UserError(f"--trainer.num_nodes {trainer.num_nodes}: start it on every machine with torchrun or srun")
    asked = trainer.num_devices * trainer.num_nodes
    if started > 1 and started != asked:
        are = f"{asked} processes, the launcher has started {started}"
        raise UserError(f"--trainer.devices and num_nodes make {are}: give both as 1, and the launcher's number holds")
    if trainer.world_size != asked:  # Lightning would train on as many as SLURM has started
        are = f"{asked} processes, SLURM has started {trainer.world_size}"
        raise UserError(f"--trainer.devices and num_nodes make {are}: take srun, or without it unset SLURM_NTASKS")

"""Errors of jsonargparse, Lightning and torch in one line, and settings with which a run cannot save and resume."""

import contextlib
import re
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cait import plugins
from cait.data.datamodule import DataSettings, ImageNetDataModule
from cait.data.folder import FolderSource
from cait.data.listing import CONFIG, list_images
from cait.errors import DISK_FULL, UserError, did_you_mean, one_line, system_error
from cait.guards import configurations
from cait.run.rundir import BEST, LAST, PREVIOUS
from cait.settings import In, Needs, Rule, flatten, listed, rules_of
from cait.train.metrics import best_mode
from cait.train.module import ModuleSettings

REPEATED = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value type:",
    "Expected a <class 'NoneType'>",
)
MOST = 100
"""Letters of a line: the value may be an object with all its settings."""
REPLACED = {
    "BaseFinetuning": "the optimizer's groups stay as they are in a run; take --model.freeze",
    "BatchSizeFinder": "find the batch before the run with Lightning's Tuner, and give it as --data.batch_size",
    "LearningRateFinder": "find the rate before the run with Lightning's Tuner, and give it as --model.lr",
    "ModelPruning": "a run cannot be resumed with it; prune the network that has been trained",
    "SpikeDetection": "a run cannot be resumed with it; --max_nonfinite_steps ends a run without finite gradients",
    "StochasticWeightAveraging": "no checkpoint would hold its average; take --ema.decay",
    "Timer": "take --trainer.max_time",
    "WeightAveraging": "checkpoints would hold its average in place of the weights; take --ema.decay",
}
"""Callbacks of Lightning that do not fit a run which saves, stops and resumes at any step, and what to do instead."""

LAUNCHERS = (LightningEnvironment, TorchElasticEnvironment, SLURMEnvironment, NoneType)
"""What says how the processes of a run were started; None for one device."""
IMAGES = ("data.root", "data.val_list", "data.labels", "data.folds")
"""Settings that say which images a run has."""
NO_VERB = Needs("a verb that tests", "", lambda: False)
BESIDE = Needs("its place beside optimizer", "", lambda: False)
RULES: dict[str, Sequence[Rule]] = {
    "model.fields.layer_scale_init": [
        Needs("LayerScale", "residual", lambda residual: residual in (None, "layerscale", "scalar"))
    ],
    "model.optimizer_args.lr": [BESIDE],
    "model.optimizer_args.weight_decay": [BESIDE],
    "trainer.accumulate_grad_batches": [In("[1, inf)")],
    "trainer.gradient_clip_val": [In("[0, inf)")],  # below 0 it would turn gradients
    "trainer.gradient_clip_algorithm": [Needs("a gradient_clip_val", "gradient_clip_val")],
    "trainer.min_epochs": [
        Needs(
            "more epochs",
            "max_epochs min_epochs",
            lambda most, least: not (most and least and 0 < most < least),
        )
    ],
    "trainer.limit_test_batches": [NO_VERB],
    "trainer.limit_predict_batches": [NO_VERB],
    "trainer.model_registry": [Needs("Lightning's own checkpoints", "", lambda: False)],
}
"""Rules of settings that are no field of ours."""
PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
"""Those of Lightning with which a resumed run is exact: the others keep states that no checkpoint holds."""
MAY_END = Needs(
    "a callback or max_time that may end the run", "callbacks max_time", lambda *ways: any(ways)
)
LEAST = {"trainer.min_epochs": [MAY_END], "trainer.min_steps": [MAY_END]}
"""Rules of a run without a module or a data module of the user's own, which may end it too."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors about settings that Lightning or jsonargparse refuses into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        if "class_path" in str(error):  # jsonargparse's, about a class that cannot be made
            raise UserError(_shortened(str(error))) from error
        *_, innermost = traceback.extract_tb(error.__traceback__)
        is_lightnings = Path(lightning.__file__).parent in Path(innermost.filename).parents
        if is_lightnings or isinstance(error, MisconfigurationException):
            raise system_error(error) or UserError(one_line(error)) from error
        raise


def tell_of_threads(report: threading.ExceptHookArgs) -> None:
    """Hide the traceback of TensorBoard's writing thread: the run itself reports a full disk in one line."""
    if not (isinstance(report.exc_value, OSError) and report.exc_value.errno in DISK_FULL):
        threading.__excepthook__(report)


def is_of_restoring(error: BaseException) -> bool:
    """Whether an error arose while Lightning put a checkpoint's states back, and nobody has said what to do."""
    if isinstance(error, UserError | OSError) or not isinstance(error, Exception):
        return False
    calls = traceback.extract_tb(error.__traceback__)
    return any(
        call.filename.endswith("checkpoint_connector.py") and "restore" in call.name
        for call in calls
    )


def explain(message: str, verb: str, known: list[str]) -> str:
    """jsonargparse's message of many lines in one. `known` has every setting of the verb, as "model.lr"."""
    if unknown := re.search(
        r"unrecognized arguments: -*([^\s=]+)|(?:Group '(\w+)' .*o|^O)ption '([^\s']+)'", message
    ):
        return _explain_unknown(".".join(filter(None, unknown.groups())), verb, known)
    if linked := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', message):
        reason = configurations.LINKED.get(linked[1], "it follows another setting")
        return f"{linked[1]} cannot be set: {reason}"
    return re.sub(r'^Parser key "(.+?)":', r"--\1:", _shortened(message))


def _explain_unknown(name: str, verb: str, known: list[str]) -> str:
    options = [f"--{setting}" for setting in known]
    ending = f".{name.rpartition('.')[2].replace('-', '_')}"
    same = [option for option in options if option.endswith(ending)]
    if same:
        hint = f"; did you mean {' or '.join(same)}?"
    else:
        hint = did_you_mean(f"--{name}", options, f"; `cait {verb} --help=all` lists what there is")
    return f"there is no setting {name}{hint}"


def _shortened(message: str) -> str:
    """What jsonargparse says of a value, without the types that it lists a second time."""
    lines = dict.fromkeys(line.strip(" -")[:MOST] for line in message.splitlines())
    return "; ".join(line for line in lines if line and not line.startswith(REPEATED)).replace(
        ":; ", ": "
    )


def check_settings(settings: Any) -> None:
    """Refuse settings of the Trainer, as the command line has them, that Lightning accepts and a run cannot have."""
    for name in (
        "max_epochs",
        "max_steps",
        "limit_train_batches",
        "val_check_interval",
        "check_val_every_n_epoch",
    ):
        if settings[name] == 0:
            raise UserError(f"--trainer.{name} 0: a run cannot train with it")
    if settings.barebones:
        raise UserError("--trainer.barebones true: a run would not log and save; leave it out")
    interval = settings.val_check_interval
    # each process would go by its own clock, and a resumed run too
    if not isinstance(interval, int | float | None):
        raise UserError(
            f"--trainer.val_check_interval counts batches or a share of an epoch, not time: {interval}"
        )
    if "://" in str(settings.default_root_dir):
        raise UserError(
            f"--trainer.default_root_dir {settings.default_root_dir}: a run is on a disk; copy it from there"
        )
    if settings.use_distributed_sampler:
        raise UserError(
            "--trainer.use_distributed_sampler true: the data module itself divides the images"
        )


def check_folder(folder: Path, data: ImageNetDataModule) -> None:
    """Refuse a folder for a new run that has images in it, or would be read as a part of the data."""
    root = Path(data.root)
    source = data.source
    images: Iterator[Any] = iter(())
    # what a run itself has drawn is no data
    if folder.is_dir() and not (folder / CONFIG).exists():
        images = list_images(folder, [""], defaultdict(list))
    if (
        (root.exists() and root.resolve().is_relative_to(folder.resolve()))
        or (isinstance(source, FolderSource) and source.takes(folder))
        or any(images)
    ):
        with contextlib.suppress(OSError):  # one that was made for this run would be read too
            folder.rmdir()
        raise UserError(
            f"{folder} is where images are, or would be read with them: "
            "give another --run_name or --trainer.default_root_dir"
        )


def rules_of_run(settings: Sequence[plugins.Setting]) -> dict[str, Sequence[Rule]]:
    """The rules of all settings of a run by name, as "model.lr". `settings` are those of no class."""
    rules = RULES | {setting.name: setting.rules for setting in settings}
    for part, group in {"data": DataSettings, "model": ModuleSettings}.items():
        rules |= {f"{part}.{name}": added for name, added in rules_of(group).items()}
    return rules


class Unused:
    """Refuses the settings of a new run that would do nothing, and such that are typed for one that goes on.

    One that a later file or word has left without what it needs is named and left out: a recipe may have set it.

    Args:
        config: all settings of the run.
        defaults: those that it has if none are given.
        sources: where settings come from.
        only: the names that are checked, of a run that goes on; None for all.
    """

    def __init__(
        self,
        config: Any,
        defaults: Any,
        sources: configurations.Sources,
        only: Collection[str] | None = None,
    ) -> None:
        self.config = config
        self.only = only
        self.values = flatten(config.as_dict())
        self.defaults = flatten(defaults.as_dict())
        self.sources = sources

    def check(self, rules: Mapping[str, Sequence[Rule]]) -> None:
        """Raise UserError if a setting lacks what it needs of other settings."""
        for name, needs in rules.items():
            group = name[: name.rfind(".") + 1]
            for need in needs:
                if isinstance(need, Needs):
                    others = [f"{group}{other}" for other in need.others.split()]
                    if not need.is_met(*map(self.values.get, others)):
                        self.refuse(name, others, need.words)

    def refuse(self, name: str, others: Sequence[str], needed: str) -> None:
        """Raise UserError if a setting is given, no earlier than the `others` that leave it without use."""
        value = self.values.get(name, self.config.get(name))  # the latter of a dictionary
        if not value or value == self.defaults.get(name):  # off, or as if it were not given
            return
        if self.only is not None and name not in self.only:
            return
        message = f"--{name} {value} does nothing without {needed}"
        if self.sources.last([name]) >= self.sources.last(others):
            raise UserError(f"{message}: leave it out")
        rank_zero_info(f"left out: {message}")

    def check_made(self, network: Any, source: Any, strategy: Any) -> None:
        """Raise UserError if a setting is of no use for the network, the source of the images or the processes."""
        if isinstance(strategy, SingleDeviceStrategy):
            self.refuse(
                "trainer.sync_batchnorm",
                ["trainer.devices", "trainer.strategy"],
                "several processes",
            )
        if getattr(network, "takes_no_drop_path_rate", False):
            self.refuse("model.drop_path_rate", ["model.name"], "a network that takes it")
        for name in getattr(source, "without_use", FolderSource.divided_by):
            self.refuse(
                f"data.{name}",
                IMAGES,
                "images still to divide; folders, a table or a list divide these",
            )
        data = self.config.data.as_dict()
        for name in plugins.without_use(data["root"], data):
            self.refuse(f"data.{name}", IMAGES, f"a root of another kind than {data['root']}")


def check_callbacks(trainer: Any, metrics: Mapping[str, str]) -> None:
    """Refuse the callbacks of `REPLACED` and their subclasses, as configurations name them, before they are made.

    Refuse also to look for the smallest value, which is Lightning's default, of a metric whose largest is the best, or
    for one of validation without it. `trainer` has the Trainer's settings, `metrics` are the user's own.
    """
    for callback in listed(trainer.callbacks):
        if hasattr(callback, "class_path"):
            problem = _problem(
                callback.class_path, callback.get("init_args") or {}, trainer, metrics
            )
            if problem:
                name = callback.class_path.rpartition(".")[2]
                raise UserError(f"--trainer.callbacks {name}: {problem}")


def _problem(class_path: str, settings: Any, trainer: Any, metrics: Mapping[str, str]) -> str:
    """What is wrong with a callback that does not fit, or may save or watch a metric; empty if nothing is."""
    module, _, name = class_path.rpartition(".")
    callback_class = getattr(sys.modules.get(module), name, None)
    for base in getattr(callback_class, "__mro__", ()):  # it may be a function
        if base.__module__.startswith("lightning.") and base.__name__ in REPLACED:
            return REPLACED[base.__name__]
    if name == "GradientAccumulationScheduler" and trainer.accumulate_grad_batches != 1:
        return "it takes the place of --trainer.accumulate_grad_batches; leave out one"
    folder = settings.get("dirpath")
    if "://" in str(folder):
        return f"checkpoints are written to a disk, not to {folder}"
    files = [f"{settings.get('filename')}.ckpt", LAST if settings.get("save_last") else ""]
    taken = {LAST, PREVIOUS, BEST}.intersection(files)
    if taken and not folder:
        return f"the run itself writes {min(taken)}, give another filename"
    metric = str(settings.get("monitor"))
    if metric.startswith("val") and trainer.limit_val_batches == 0:
        return f"--trainer.limit_val_batches 0 leaves no {metric}"
    if settings.get("mode") == "min" and best_mode(metric, metrics) == "max":
        return f"the largest {metric} is the best, give it mode max"
    return ""


def check_rates(schedule: Any, images: int) -> None:
    """Refuse a least learning rate above the highest one, for steps of so many images."""
    peak = schedule.lr * max(1, images / (schedule.lr_base_size or images))
    if schedule.schedule != "constant" and schedule.min_lr > peak:
        raise UserError(
            f"--model.min_lr {schedule.min_lr:g} is above --model.lr {schedule.lr:g}; lower it"
        )


def check_strategy(trainer: Trainer, settings: Any) -> None:
    """Refuse a strategy that cannot save and resume a run, and settings that one's own method `check` refuses."""
    strategy = trainer.strategy
    plugin = type(trainer.precision_plugin)
    if plugin.__module__.startswith("lightning.") and plugin not in PRECISIONS:
        raise UserError(
            f"--trainer.precision {trainer.precision}: a run cannot be resumed to the bit with it; take bf16-mixed"
        )
    name = type(strategy).__name__
    if hasattr(strategy, "check"):
        strategy.check(trainer.precision, bool(settings.sync_batchnorm))
    elif type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise UserError(
            f"--trainer.strategy: runs save and resume with ddp or one device, not {name}"
        )
    # The process that forks or spawns others does not train: it holds the lock, and gets the signals.
    if not isinstance(strategy.launcher, _SubprocessScriptLauncher | None):
        raise UserError(
            f"--trainer.strategy: runs save and resume with ddp or one device, not {name} in "
            "processes that are forked or spawned; a notebook takes --trainer.devices 1"
        )


def check_processes(trainer: Trainer, started: int) -> None:
    """Refuse a run that does not have the processes that the user asked for, where a launcher has `started` so many."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(cluster, LAUNCHERS):
        raise UserError(
            f"{type(cluster).__name__} cannot start the processes of a run: take torchrun, srun or --trainer.devices"
        )
    if trainer.num_nodes > 1 and isinstance(cluster, LightningEnvironment):
        raise UserError(
            f"--trainer.num_nodes {trainer.num_nodes}: start it on every machine with torchrun or srun"
        )
    asked = trainer.num_devices * trainer.num_nodes
    # Lightning would train on as many as these
    actual = trainer.world_size if started in (1, asked) else started
    if actual != asked:
        raise UserError(
            f"--trainer.devices and num_nodes make {asked} processes, {actual} were started: "
            "give both as 1 to torchrun; under SLURM take srun, or unset SLURM_NTASKS"
        )

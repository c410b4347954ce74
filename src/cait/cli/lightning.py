"""LightningCLI with what a run has: its folder, its loggers, checkpoints and screen."""

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import torch
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import nn

import cait
from cait import ckpt, disk, plugins, signature
from cait.cli.options import Line, settings_of
from cait.data.datamodule import DataSettings, ImageNetDataModule
from cait.data.folder import list_once
from cait.errors import UserError, error_line, printable
from cait.guards import configurations, refusals
from cait.guards.nonfinite import NonFiniteGuard, UnreadableReport
from cait.guards.run_lock import RunLock
from cait.loops import accumulated
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint, DurableCheckpointIO, LastCheckpoint, newest_whole
from cait.run.loggers import run_loggers
from cait.run.program import Program
from cait.run.signals import output_may_go
from cait.settings import Settings, check, flatten, nested
from cait.train.callbacks import EMA, StepSeed
from cait.train.metrics import known_mode, metric_of_best
from cait.train.module import CaiTModule, ModuleSettings

RUN_VARIABLE = "CAIT_RUN"
"""Passes the run's name from the first process to the others that Lightning starts."""
# Lightning says these at every start or resume. The user cannot change what they report, or has asked for it.
NOISE = (
    "💡 Tip",
    "GPU available: False",
    "TPU available: False",
    "Seed set to",
    "Loading `train_dataloader`",
    "Trainer already configured with model summary",
    "`Trainer.fit` stopped: `max_",  # the summary says it
)
WARNINGS = (
    "Be aware that when using `ckpt_path`",  # an extra whose callback has a state in the checkpoint may be gone
    "You're resuming from a checkpoint that ended before the epoch ended",  # the loader starts where it stopped
    r".*LeafSpec.* is deprecated",
    r".*does not have many workers",
    r".*recommended to use `self.log\(.*sync_dist=True",  # torchmetrics has synchronized them
    r"Checkpoint directory .* exists and is not empty",
    r"`ModelCheckpoint\(monitor=.* could not find the monitored key",  # a run that ends before a validation
    r".*number of training batches .* is smaller than the logging interval",
)
SUBCOMMANDS = {"fit": "fit", "eval": "validate"}
"""The verbs of LightningCLI that do the work of ours."""
OWN = ("ckpt_path", "data.root", "data.num_workers", "_dir")
"""How settings end that may differ from machine to machine of a run."""


class SaveConfig(Callback):
    """Write config.yaml, signed, when training begins: a command that is refused earlier leaves the file alone."""

    def __init__(self, parser: LightningArgumentParser, config: Any) -> None:
        self.text = parser.dump(config, skip_none=False)
        if found := re.search(".*Unable to serialize instance.*", self.text):  # a resumed run could not read it back
            raise UserError(f"config.yaml cannot hold {found[0].strip()}: take text or a number instead")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is None:  # a kill may come before the first step, while the head is solved
            self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with disk.atomic_write(Path(trainer.default_root_dir) / rundir.CONFIG) as beside:
                beside.write_text(signature.signed(self.text))


class SyncBatchNorms(TorchSyncBatchNorm):
    """Share the statistics of BatchNorm, also in timm's networks: in theirs Lightning's would drop the activations."""

    def apply(self, model: nn.Module) -> nn.Module:
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return model  # in evaluation it computes as before


class CaiTCLI(LightningCLI):
    """`fit` writes everything below `<trainer.default_root_dir, else logs>/<run>/`."""

    lock: RunLock | None = None
    unused: refusals.Unused | None = None
    checkpoint: str | None = None
    checkpoint_epoch: int | None = None
    checkpoint_step: int | None = None
    uses_average = False
    """Whether the checkpoint stands for its moving average."""

    @refusals.in_one_line()
    def __init__(self, line: Line, program: Program) -> None:
        self.line, self.program, self.processes = line, program, program.processes
        _hide_noise()
        threading.excepthook = refusals.tell_of_threads
        # Raise errors, so that one line reports them. Do not guess an option from its first letters.
        strict: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        usage = f"cait {line.verb} [--NAME VALUE ...]"
        try:
            super().__init__(
                program.module or CaiTModule,
                program.data or ImageNetDataModule,
                save_config_callback=None,  # a run has `SaveConfig` before other callbacks
                # The data module divides the images, exactly.
                trainer_defaults={"use_distributed_sampler": False, "num_sanity_val_steps": 1},
                seed_everything_default=0,
                auto_configure_optimizers=False,
                parser_kwargs=strict | {SUBCOMMANDS[line.verb]: strict | {"usage": usage}},
            )
        except BaseException as error:
            if self.lock:
                self.lock.roll_back()
            if refusals.is_of_restoring(error):
                raise UserError(f"{self.checkpoint} cannot be continued from: {error_line(error)}") from error
            raise
        if self.lock:
            self.lock.release()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the verb that is run: parsers for all verbs would take a third of a second more."""
        subcommand = SUBCOMMANDS[self.line.verb]
        return {subcommand: LightningCLI.subcommands()[subcommand]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the string below a field is its help
        for group in (DataSettings, ModuleSettings):
            group.__init__.__annotations__ = get_type_hints(group)  # without rules, which would hide lists and choices
        return super().init_parser(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(EMA, "ema")
        settings = settings_of(self.line.verb)
        for setting in settings:
            parser.add_argument(f"--{setting.name}", type=setting.type, default=setting.default, help=setting.help)
        self.rules = refusals.rules_of_run(settings)
        for action in parser._actions:
            notes = [rule.help for rule in self.rules.get(action.dest, ()) if rule.help]
            if notes:
                action.help = f"{action.help or ''} ({', '.join(notes)})"
        for name in ("img_size", "mean", "std"):
            parser.link_arguments(f"data.{name}", f"model.{name}")
        parser.link_arguments("model.fields", "data.in_chans", lambda fields: (fields or {}).get("in_chans", 3))
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")
        parser.link_arguments("data", "model.task", lambda data: getattr(data, "task", None), "instantiate")
        drawn = os.getenv("PL_GLOBAL_SEED", 0)  # what Lightning takes for true
        parser.link_arguments("seed_everything", "data.seed", lambda seed: int(drawn if seed is True else seed))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        subcommand, line = SUBCOMMANDS[self.line.verb], self.line
        shown = [word for word in line.words if word.startswith("--print_config")]
        words, config = [word for word in line.words if word not in shown], None
        try:
            for path, settings in line.layers:
                config = parser.parse_object({subcommand: self._checked(path, settings)}, config)
            config = parser.parse_args([subcommand, *words], config)
            for step in line.steps:
                given = line.sources.given(config[subcommand].as_dict())
                if added := step(given):
                    line.layers.append((None, nested(added)))
                    config = parser.parse_object({subcommand: nested(given | added)}, config)
            self.config = parser.parse_args([subcommand, *shown], config) if shown else config
        except ArgumentError as error:
            raise UserError(refusals.explain(str(error), line.verb, self._known())) from error
        self.processes.follow_launcher(self.config[self.config.subcommand].trainer)
        if line.verb == "fit":
            self._check_settings()

    def _check_settings(self) -> None:
        config = self.config.fit
        values = flatten(config.as_dict())
        for name in self.rules.keys() & values.keys():
            check(name.rpartition(".")[2], values[name], self.rules[name])
        refusals.check_settings(config.trainer)
        refusals.check_callbacks(config.trainer, config.get("model.metrics") or {})
        if config.weights_only is False:
            raise UserError("--weights_only false: checkpoints hold plain values alone; leave it out")
        if config.ckpt_path is None:
            defaults = self._parser("fit").get_defaults()
            self.unused = refusals.Unused(config, defaults, self.line.sources)
            self.unused.check(self.rules)

    def _known(self) -> list[str]:
        """Every setting and group of settings, as "model" and "model.lr"."""
        return list(self._parser(SUBCOMMANDS[self.line.verb]).get_defaults().keys(branches=True))

    def _checked(self, path: Path | None, settings: Settings) -> Settings:
        """A layer; of a run's file, and where nothing is trained, the settings that the verb takes of it."""
        trains = self.line.verb == "fit"
        if path is not None and path.name == rundir.CONFIG:
            settings, left_out = configurations.without_absent(settings, self._known())
            if left_out and trains:  # another verb has none of the settings of training
                rank_zero_info(f"{path}: left out {', '.join(left_out)}, because no extra that is here takes them")
        return settings if trains else configurations.without_classes(settings)

    def _parse_ckpt_path(self) -> None:
        config = self.config[self.config.subcommand]
        for name in self.line.typed & {"model.weights", "model.pretrained", "model.fields.layer_scale_init"}:
            if config.ckpt_path is not None and flatten(config.as_dict()).get(name):
                raise UserError(f"--{name} is not read beside the checkpoint {config.ckpt_path}: leave it out")
        if self.config.subcommand == "fit":
            self._meet()
        # Lightning would silently prefer the checkpoint's hyper-parameters to the command line. Here the
        # configuration says what the model is, and a checkpoint that does not fit is refused.
        if config.ckpt_path is None:
            if self.config.subcommand != "fit" and not (config.model.weights or config.model.pretrained):
                ways = "give --ckpt_path or --model.weights FILE, or use `cait eval RUN` for a run"
                raise UserError(f"nothing to score: {ways}")
        else:
            self.checkpoint = config.ckpt_path
            checkpoint = ckpt.read_checkpoint(config.ckpt_path)
            config.weights_only = True  # whatever the configuration says; Lightning reads the file again
            self.uses_average = ckpt.uses_average(checkpoint)
            self.checkpoint_epoch, self.checkpoint_step = checkpoint.get("epoch"), int(checkpoint["global_step"])

    def _meet(self) -> None:
        """Wait for the other processes. If torchrun has restarted them, continue from the run's last checkpoint."""
        config = self.config.fit
        restarts = self.processes.agree(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # each node counts its own
        if any(map(int, restarts)) and not config.trainer.fast_dev_run:
            folder = self._name_run() / rundir.CHECKPOINTS
            if config.ckpt_path is None or not _is_in(folder, config.ckpt_path):
                config.ckpt_path = self.processes.of_first(lambda: str(newest_whole(folder) or "")) or config.ckpt_path

    def _name_run(self) -> Path:
        """The run's folder. It is made now if the run has no name."""
        config = self.config.fit
        root = Path(config.trainer.default_root_dir or rundir.LOGS)
        launched = "LOCAL_RANK" in os.environ or self.processes.started() > 1  # by torchrun or Lightning, or by SLURM
        name = config.run_name or (os.environ.get(RUN_VARIABLE) if launched else None)
        if name is None:
            base = configurations.recipe(self.line.layers) or self.program.default_name or config.model.name
            base = re.sub(r"[^\w.=+-]+", "-", base).strip("-.=+") or "run"
            # Processes that were launched separately cannot agree on a number.
            name = base if launched else rundir.new_folder(root, base).name
        configurations.check_run_name(name)
        os.environ[RUN_VARIABLE] = config.run_name = name
        return root / name

    def _lock_run_dir(self) -> Path:
        config = self.config.fit
        if config.trainer.fast_dev_run:  # it writes nothing
            return Path(config.trainer.default_root_dir or rundir.LOGS)
        run_dir = self._name_run()
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # set from the launcher's variables
            self.lock = RunLock(run_dir)
            folder, start = run_dir / rundir.CHECKPOINTS, config.ckpt_path
            resumes = any(path == run_dir / rundir.CONFIG for path, _ in self.line.layers)  # maybe from elsewhere
            if rundir.checkpoints(folder) and not (start and (resumes or _is_in(folder, start))):
                resume = self.program.command("resume", run_dir)
                raise UserError(f"{run_dir} holds a run: go on with `{resume}` or give another --run_name")
        return run_dir

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init[self.subcommand].trainer
        if self.config[self.subcommand].ckpt_path is not None:
            self.model.starts_anew = False  # the weights that it began with may be gone
        callbacks: list[Callback] = [StepSeed(self.datamodule.seed)]
        kwargs["plugins"] = [*_listed(given.plugins)]
        if given.sync_batchnorm and not any(isinstance(plugin, LayerSync) for plugin in kwargs["plugins"]):
            kwargs["plugins"].append(SyncBatchNorms())
        has_own_bar = any(isinstance(callback, ProgressBar) for callback in _listed(given.callbacks))
        if not (has_own_bar or sys.stdout.isatty()):  # a bar would fill a log
            kwargs["enable_progress_bar"] = False
        if self.subcommand == "fit":
            callbacks += self._parts_of_a_run(given, kwargs)
        else:
            kwargs.update(logger=False, enable_checkpointing=False)
        has_own = any(isinstance(plugin, ClusterEnvironment) for plugin in kwargs["plugins"])
        if isinstance(cluster := self.processes.cluster(), SLURMEnvironment) and not has_own:
            kwargs["plugins"].append(cluster)
        trainer = super().instantiate_trainer(**kwargs, callbacks=[*_listed(given.callbacks), *callbacks])
        refusals.check_strategy(trainer, given)
        refusals.check_processes(trainer, self.processes.started())
        if self.unused is not None:
            self.unused.check_made(self.model.model, self.datamodule.source, trainer.strategy)
        if self.subcommand == "fit":
            self.datamodule.share_batch(trainer)  # before other processes are started
            images = self.datamodule.batch_size * trainer.world_size * accumulated(trainer, 0)
            refusals.check_rates(self.model.settings, images)
        return trainer

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, in LightningCLI's place."""
        if self.processes.started() > 1:
            list_once(self.datamodule.source, self.processes.of_machine)
            self.processes.compare(self._facts())
        try:
            with output_may_go():
                self.trainer.fit(*args, **kwargs)
        except BaseException as error:
            if any(isinstance(each, LastCheckpoint) and each.has_begun for each in self.trainer.checkpoint_callbacks):
                error.add_note(f"to continue: {self.program.command('resume', self.run_dir)}")
            # An error while another is handled, as on a full disk, keeps the Trainer from ending the loader's
            # workers. They ignore SIGTERM, so Python would wait for them for ever.
            with contextlib.suppress(Exception):
                self.trainer.fit_loop.teardown()
            raise

    def _facts(self) -> dict[str, str]:
        """What all processes of a run must have alike, on whatever machines."""
        dumped = self._parser("fit").dump(self.config.fit, skip_none=False)
        settings = flatten(configurations.load(dumped, "the settings"))
        start = f"{Path(self.checkpoint or '').name} at step {self.checkpoint_step}"
        facts = self.datamodule.facts() | {"code": _code_version(), "torch": torch.__version__, "checkpoint": start}
        return facts | {f"--{name}": str(value) for name, value in settings.items() if not name.endswith(OWN)}

    def _parts_of_a_run(self, given: Any, kwargs: dict[str, Any]) -> list[Callback]:
        """Lock the folder of the run, and make its loggers and callbacks."""
        config = self.config.fit
        config.best_metric = metric_of_best(config.best_metric, self.model.task.metric, config.ema.decay is not None)
        best_mode = config.best_mode or known_mode(config.best_metric, self.model.val_metrics.own)
        self.run_dir = self._lock_run_dir()
        continued = rundir.checkpoints(self.run_dir / rundir.CHECKPOINTS)
        first_step = (self.checkpoint_step or 0) if continued else 0  # a new run may start from another's checkpoint
        parts = self.datamodule, self.model, first_step, self.program, self.line.typed
        run = plugins.Run(config, given, self.run_dir, *parts)
        config.ckpt_path = None  # the run's configuration does not say where it was resumed from
        kwargs["default_root_dir"] = self.run_dir
        callbacks: list[Callback] = [self.lock] if self.lock else []
        if not given.fast_dev_run:
            callbacks.append(SaveConfig(self._parser("fit"), config))
            self.datamodule.unreadable_path = self.run_dir / rundir.UNREADABLE
            self.datamodule.validation_path = self.run_dir / rundir.VALIDATION
            if continued:
                self._keep_held_out()
        if given.max_steps > 0:  # a trial of a few steps logs metrics too
            kwargs["log_every_n_steps"] = min(given.log_every_n_steps or 50, given.max_steps)
        if given.logger is not False:
            named = [] if given.logger is True else _listed(given.logger)
            kwargs["logger"] = [*run_loggers(self.run_dir, first_step), *named]
        callbacks += plugins.step_callbacks(self.model, self.datamodule)
        callbacks += [callback for make in plugins.of_kind("callbacks") for callback in make(run)]
        callbacks += [NonFiniteGuard(self.run_dir, config.max_nonfinite_steps), UnreadableReport(self.datamodule)]
        if given.enable_checkpointing is not False and not given.fast_dev_run:
            folder = self.run_dir / rundir.CHECKPOINTS
            kwargs["plugins"].append(DurableCheckpointIO())
            callbacks.append(BestCheckpoint(folder, config.best_metric, best_mode))
            callbacks.append(LastCheckpoint(folder, config.save_every_n_steps, config.save_every_n_minutes))
        return callbacks

    def _keep_held_out(self) -> None:
        """Validate on the images that the run has held out. Raises UserError if a setting asks for others."""
        config = rundir.config(self.run_dir)
        before = next((layer for path, layer in self.line.layers if path == config), {}).get("data") or {}
        for name in getattr(self.datamodule.source, "divided_by", ()):
            was, now = before.get(name), self.config.fit.data.get(name)
            if name in before and was != now and self.datamodule.validation_path.is_file():
                kept = f"the run validates on the images of {self.datamodule.validation_path}"
                raise UserError(f"{kept}; leave out --data.{name}, which was {was}, or start a new run")
        self.datamodule.keep_held_out()


def _is_in(folder: Path, file: str) -> bool:
    return Path(file).resolve().parent == folder.resolve()


def _code_version() -> str:
    """The package's version, with a digest of its source."""
    source = Path(cait.__file__).parent
    files = [path for path in sorted(source.rglob("*.py")) if "tests" not in path.relative_to(source).parts]
    digest = hashlib.sha256("".join(map(disk.read_text, files)).encode())
    return f"{cait.__version__} ({digest.hexdigest()[:16]})"


def _hide_noise() -> None:
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for package in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(package).handlers:
            handler.addFilter(_shown)


def _shown(record: logging.LogRecord) -> bool:
    """Whether to show what Lightning, or we through it, say; names from files are made `printable`."""
    text = record.getMessage()
    record.msg, record.args = "\n".join(map(printable, text.split("\n"))), ()
    return not text.lstrip().startswith(NOISE)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]

"""LightningCLI with what a run has: its folder, its lock, its plan."""

import contextlib
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities import rank_zero_info

from cait import ckpt, plugins, references
from cait.cli import noise
from cait.cli.options import Line, settings_of
from cait.cli.run_plan import RunPlan, SyncBatchNorms, plan_run, resolve_config
from cait.data.datamodule import DataSettings, ImageNetDataModule
from cait.errors import UserError, abbreviate, as_typed, error_line
from cait.guards import configurations, refusals
from cait.guards.configurations import entries
from cait.guards.run_lock import RunLock
from cait.loops import accumulated, start_where_told
from cait.run import rundir, signals
from cait.run.checkpoints import LastCheckpoint, newest_whole
from cait.run.program import Program
from cait.settings import Settings, check, flatten, listed, nested
from cait.train.callbacks import EMA
from cait.train.module import CaiTModule, ModuleSettings

RUN_VARIABLE = "CAIT_RUN"
"""Passes the run's name from the first process to the others that Lightning starts."""
SUBCOMMANDS = {"fit": "fit", "eval": "validate"}
"""The verbs of LightningCLI that do the work of ours."""
LISTS = {"trainer.callbacks", "trainer.logger", "trainer.plugins"}
"""Settings that may be one class too, in place of a list."""


class CaiTCLI(LightningCLI):
    """`fit` writes everything below `<trainer.default_root_dir, else logs>/<run>/`."""

    subcommand: Any
    run_dir: Path
    lock: RunLock | None = None
    unused: refusals.Unused
    checkpoint: str | None = None
    checkpoint_epoch: int | None = None
    checkpoint_step: int | None = None
    uses_average = False
    """Whether the checkpoint stands for its moving average."""

    @refusals.in_one_line()
    def __init__(self, line: Line, program: Program, prints_plan: bool = False) -> None:
        self.line = line
        self.program = program
        self.processes = program.processes
        self.prints_plan = prints_plan
        self.subcommand = SUBCOMMANDS[line.verb]
        line.take_classes(program)
        noise.hide()
        threading.excepthook = refusals.tell_of_threads
        # Raise errors, so that one line reports them. Do not guess an option from its first letters.
        strict: Settings = {"exit_on_error": False, "allow_abbrev": False}
        options = "[--print_plan] " if line.verb == "fit" else ""
        try:
            super().__init__(
                program.module or CaiTModule,
                program.data or ImageNetDataModule,
                save_config_callback=None,  # a run has `SaveConfig` before other callbacks
                trainer_class=signals.Trainer,
                # The data module divides the images, exactly.
                trainer_defaults={"use_distributed_sampler": False, "num_sanity_val_steps": 1},
                seed_everything_default=0,
                auto_configure_optimizers=False,
                parser_kwargs=strict
                | {
                    self.subcommand: strict
                    | {"usage": as_typed(f"cait {line.verb} {options}[--NAME VALUE ...]")}
                },
            )
        except BaseException as error:
            if self.lock:
                self.lock.roll_back()
            if refusals.is_of_restoring(error):
                raise UserError(
                    f"{self.checkpoint} cannot be continued from: {error_line(error)}"
                ) from error
            raise
        if self.lock:
            self.lock.release()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the verb that is run: parsers for all verbs would take a third of a second more."""
        return {self.subcommand: LightningCLI.subcommands()[self.subcommand]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # The string below a field is its help. To read all of them takes half a second, so only where they are shown.
        shown = any(re.match("--help|--print_config=.*comments", word) for word in self.line.words)
        set_parsing_settings(docstring_parse_attribute_docstrings=shown)
        for group in (DataSettings, ModuleSettings):
            # without rules, which would hide lists and choices
            group.__init__.__annotations__ = get_type_hints(group)
        return super().init_parser(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(EMA, "ema")
        settings = settings_of(self.line.verb)
        for setting in settings:
            parser.add_argument(
                f"--{setting.name}", type=setting.type, default=setting.default, help=setting.help
            )
        self.rules = refusals.rules_of_run(settings)
        for action in parser._actions:
            notes = [rule.help for rule in self.rules.get(action.dest, ()) if rule.help]
            if notes:
                action.help = f"{action.help or ''} ({', '.join(notes)})"
        for name in ("img_size", "mean", "std"):
            parser.link_arguments(f"data.{name}", f"model.{name}")
        parser.link_arguments(
            "model.fields", "data.in_chans", lambda fields: (fields or {}).get("in_chans", 3)
        )
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")
        parser.link_arguments("data.task", "model.task", apply_on="instantiate")
        drawn = os.getenv("PL_GLOBAL_SEED", 0)  # what Lightning takes for true
        parser.link_arguments(
            "seed_everything", "data.seed", lambda seed: int(drawn if seed is True else seed)
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        subcommand = self.subcommand
        # the parser above it would not know the list that a `callbacks+` appends to
        of_verb = self._parser(subcommand)
        line = self.line
        shown = [word for word in line.words if word.startswith("--print_config")]
        words = [word for word in line.words if word not in shown]
        config = self.defaults = of_verb.get_defaults()
        before = Namespace()  # nobody has given the defaults
        try:
            for path, settings in line.layers:
                # the last parse looks for the defaults of the classes that are named
                config = of_verb.parse_object(self._checked(path, settings), config, defaults=False)
                before = _tell_replaced(before, config)
            config = _tell_replaced(before, of_verb.parse_args(words, config))
            for step in line.steps:
                settings = line.sources.given(config.as_dict())
                if added := step(settings):
                    line.layers.append((None, nested(added)))
                    config = of_verb.parse_object(nested(settings | added), config)
            self.config = Namespace({"subcommand": subcommand, subcommand: config})
            if shown:
                parser.parse_args([subcommand, *shown], self.config)
        except ArgumentError as error:
            raise UserError(refusals.explain(str(error), line.verb, self._known())) from error
        self._name_classes()
        self.processes.follow_launcher(self.config[subcommand].trainer)
        if subcommand == "fit":
            self._check_settings()

    def _name_classes(self) -> None:
        """Let the run's configuration name its classes, so that every verb finds them."""
        for name, cls in (("module", self.program.module), ("data_module", self.program.data)):
            if cls is not None:
                path = references.name_of(cls)
                self.config[self.subcommand][name] = path if references.is_path(path) else None

    def _check_settings(self) -> None:
        config = self.config.fit
        values = flatten(config.as_dict())
        for name in self.rules.keys() & values.keys():
            check(name.rpartition(".")[2], values[name], self.rules[name])
        refusals.check_settings(config.trainer)
        refusals.check_callbacks(config.trainer, config.get("model.metrics") or {})
        if config.weights_only is False:
            raise UserError(
                "--weights_only false: checkpoints hold plain values alone; leave it out"
            )
        files = [path for path, _ in self.line.layers if path is not None]
        goes_on = config.ckpt_path is not None or any(map(rundir.is_of_run, files))
        typed = self.line.typed if goes_on else None
        self.unused = refusals.Unused(config, self.defaults, self.line.sources, typed)
        self.unused.check(self.rules)
        if self.program.module is None and self.program.data is None:
            self.unused.check(refusals.LEAST)

    def _known(self) -> list[str]:
        """Every setting and group of settings, as "model" and "model.lr"."""
        return list(self.defaults.keys(branches=True))

    def _checked(self, path: Path | None, settings: Settings) -> Settings:
        """A layer; of a run's file, and where nothing is trained, the settings that the verb takes of it."""
        trains = self.subcommand == "fit"
        if path is not None and rundir.is_of_run(path):
            settings, left_out = configurations.without_absent(settings, self._known())
            if left_out and trains:  # another verb has none of the settings of training
                rank_zero_info(
                    f"{path}: left out {', '.join(left_out)}, because no extra that is here takes them"
                )
        return settings if trains else configurations.without_classes(settings)

    def _parse_ckpt_path(self) -> None:
        config = self.config[self.subcommand]
        for name in self.line.typed & {
            "model.weights",
            "model.pretrained",
            "model.fields.layer_scale_init",
        }:
            if config.ckpt_path is not None and flatten(config.as_dict()).get(name):
                raise UserError(
                    f"--{name} is not read beside the checkpoint {config.ckpt_path}: leave it out"
                )
        if self.subcommand == "fit":
            self._meet()
        # Lightning would silently prefer the checkpoint's hyper-parameters to the command line. Here the
        # configuration says what the model is, and a checkpoint that does not fit is refused.
        if config.ckpt_path is not None:
            self.checkpoint = config.ckpt_path
            checkpoint = ckpt.read_checkpoint(config.ckpt_path)
            config.weights_only = (
                True  # whatever the configuration says; Lightning reads the file again
            )
            self.uses_average = ckpt.uses_average(checkpoint)
            self.checkpoint_epoch = checkpoint.get("epoch")
            self.checkpoint_step = checkpoint["global_step"]
        elif self.subcommand != "fit" and not (config.model.weights or config.model.pretrained):
            raise UserError(
                "nothing to score: give --ckpt_path or --model.weights FILE, or use `cait eval RUN` for a run"
            )

    def _meet(self) -> None:
        """Wait for the other processes. If torchrun has restarted them, continue from the run's last checkpoint."""
        config = self.config.fit
        # each node counts its own
        restarts = self.processes.agree(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if config.trainer.fast_dev_run or not any(map(int, restarts)):
            return
        folder = self._run_folder() / rundir.CHECKPOINTS
        if config.ckpt_path is None or not _is_in(folder, config.ckpt_path):
            last = self.processes.from_first(lambda: str(newest_whole(folder) or ""))
            config.ckpt_path = last or config.ckpt_path

    def _run_folder(self) -> Path:
        """The run's folder. If the run has no name, the folder is made now, or only named for --print_plan."""
        config = self.config.fit
        root = Path(config.trainer.default_root_dir or rundir.LOGS)
        if config.trainer.fast_dev_run:  # it writes nothing
            return root
        launched = self.processes.is_launched()
        name = config.run_name or (os.environ.get(RUN_VARIABLE) if launched else None)
        if name is None:
            recipe = (
                configurations.recipe(self.line.layers)
                or self.program.default_name
                or config.model.name
            )
            name = re.sub(r"[^\w.=+-]+", "-", recipe).strip("-.=+") or "run"
            if not launched:  # processes that were launched separately cannot agree on a number
                name = rundir.new_folder(root, name, make=not self.prints_plan).name
        configurations.check_run_name(name)
        os.environ[RUN_VARIABLE] = config.run_name = name
        return root / name

    def _take_folder(self) -> Path:
        """The run's folder, locked. Raises UserError if it holds a run and this one does not go on with it."""
        folder = self._run_folder()
        start = self.config.fit.ckpt_path
        if self.config.fit.trainer.fast_dev_run or self.processes.rank() > 0:
            return folder
        checkpoints = folder / rundir.CHECKPOINTS
        # maybe from elsewhere
        resumes = any(path == folder / rundir.CONFIG for path, _ in self.line.layers)
        goes_on = resumes or (start and _is_in(checkpoints, start))
        if not goes_on:
            refusals.check_folder(folder, self.datamodule)
        if not self.prints_plan:
            self.lock = RunLock(folder)
        if rundir.checkpoints(checkpoints) and not (start and goes_on):
            resume = self.program.command("resume", folder)
            raise UserError(
                f"{folder} holds a run: go on with `{resume}` or give another --run_name"
            )
        return folder

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand].trainer
        if self.checkpoint:
            self.model.starts_anew = False  # the weights that it began with may be gone
        # a bar would fill a log
        if not (_has(ProgressBar, listed(settings.callbacks)) or sys.stdout.isatty()):
            kwargs["enable_progress_bar"] = False
        kwargs["plugins"] = self._plugins(settings)
        if self.subcommand == "fit":
            plan = self._plan(settings, kwargs["plugins"])
            if self.prints_plan:
                print(plan)
                raise SystemExit(0)
            self.config.fit = plan.run.config
            kwargs |= plan.trainer
            kwargs["callbacks"] = [callback for callback, _ in plan.callbacks]
            if self.lock:
                # After `LastCheckpoint`, whose errors keep the run from being finished.
                kwargs["callbacks"].insert(1, self.lock)
        else:
            kwargs["logger"] = kwargs["enable_checkpointing"] = False
        trainer: Any = super().instantiate_trainer(**kwargs)
        start_where_told(trainer)
        refusals.check_strategy(trainer, settings)
        refusals.check_processes(trainer, self.processes.started())
        if self.subcommand == "fit":
            self.unused.check_made(self.model.model, self.datamodule.source, trainer.strategy)
            if trainer.world_size > 1:
                trainer.callbacks.append(signals.StopTogether())
            self.datamodule.share_batch(trainer)  # before other processes are started
            images = self.datamodule.batch_size * trainer.world_size * accumulated(trainer, 0)
            refusals.check_rates(self.model.settings, images)
        self.processes.agree()  # that no process has met an error until here
        return trainer

    def _plugins(self, settings: Any) -> list[Any]:
        """The Trainer's plugins, with those for --trainer.sync_batchnorm and for SLURM unless there are others."""
        trainer_plugins = listed(settings.plugins)
        cluster = self.processes.cluster()
        if settings.sync_batchnorm and not _has(LayerSync, trainer_plugins):
            trainer_plugins.append(SyncBatchNorms())
        if isinstance(cluster, SLURMEnvironment) and not _has(ClusterEnvironment, trainer_plugins):
            trainer_plugins.append(cluster)
        return trainer_plugins

    def _plan(self, settings: Any, trainer_plugins: list[Any]) -> RunPlan:
        """What the run will be. Its folder is taken before, so that nothing in it changes meanwhile."""
        self.run_dir = folder = self._take_folder()
        goes_on = bool(rundir.checkpoints(folder / rundir.CHECKPOINTS))
        if not settings.fast_dev_run:
            self.datamodule.unreadable_path = folder / rundir.UNREADABLE
            self.datamodule.validation_path = folder / rundir.VALIDATION
            if goes_on:
                self._keep_held_out()
        # a new run may start from another's checkpoint
        first_step = (self.checkpoint_step or 0) if goes_on else 0
        start = f"{self.checkpoint} at step {self.checkpoint_step}" if self.checkpoint else ""
        config = resolve_config(self.config.fit, self.model)
        run = plugins.Run(
            config,
            settings,
            folder,
            self.datamodule,
            self.model,
            first_step,
            self.program,
            self.line.typed,
            start,
        )
        return plan_run(run, self._parser("fit").dump(config, skip_none=False), trainer_plugins)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, in LightningCLI's place."""
        try:
            self.trainer.fit(*args, **kwargs)
        except BaseException as error:
            has_begun = any(callback.has_begun for callback in LastCheckpoint.among(self.trainer))
            is_gone = self.lock.guard.is_gone() if self.lock else not self.run_dir.is_dir()
            if has_begun and not is_gone:
                error.add_note(f"to continue: {self.program.command('resume', self.run_dir)}")
            # An error while another is handled, as on a full disk, keeps the Trainer from ending the loader's
            # workers. They ignore SIGTERM, so Python would wait for them for ever.
            with contextlib.suppress(Exception):
                self.trainer.fit_loop.teardown()
            # of what writes there
            if self.lock and isinstance(error, OSError | RuntimeError):
                self.lock.guard.check()
            raise

    def _keep_held_out(self) -> None:
        """Validate on the images that the run has held out. Raises UserError if a setting asks for others."""
        data = self.datamodule
        before = dict(self.line.layers).get(rundir.config(self.run_dir), {}).get("data") or {}
        for name in getattr(data.source, "divided_by", ()):
            is_changed = name in before and before[name] != self.config.fit.data.get(name)
            if is_changed and data.validation_path.is_file():
                raise UserError(
                    f"the run validates on the images of {data.validation_path}; "
                    f"leave out --data.{name}, which was {before[name]}, or start a new run"
                )
        data.keep_held_out()


def _tell_replaced(before: Namespace, after: Namespace) -> Namespace:
    """Return `after`; say what a later file or option leaves out of a list or a dictionary, unless it empties it."""
    for name, value in before.items(branches=True):
        if isinstance(value, list | dict) or name in LISTS:
            others = entries(after.get(name))
            if others and (missing := [*(entries(value) - others).elements()]):
                to_append = "" if isinstance(value, dict) else f"; {name}+ would append"
                rank_zero_info(
                    f"left out of {name}, which is given again: {abbreviate(missing)}{to_append}"
                )
    return after


def _has(kind: type, objects: list[Any]) -> bool:
    """Whether an object of this class is among them."""
    return any(isinstance(value, kind) for value in objects)


def _is_in(folder: Path, file: str) -> bool:
    return Path(file).resolve().parent == folder.resolve()

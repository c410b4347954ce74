"""What a run prints at its start and its end: what is going to run, an estimate of its time, results, what to type."""

import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from cait import ckpt, plugins
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError, abbreviate, console, printable, to_type
from cait.extras.display import duration, network_name
from cait.loops import Position, batches_a_step, total_steps
from cait.model import network
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.train.optim import ScheduleSettings, WarmupSchedule

MEASURED_STEPS = range(10, 20)
"""Steps of a process whose pace gives the estimate of its time. The ones before start workers and choose kernels."""
LOOKS = {"see its mistakes": "visualize", "draw the curves": "compare"}
"""What to do with a run, and the verb for it, if there is one."""
LIMITS = {"ckpt_path", "trainer.max_epochs", "trainer.max_steps", "trainer.max_time"}
"""What is used also where a run has ended."""


class Banner(ModelSummary):
    """Print a table of what is going to run when training starts, and an estimate of the time after 20 steps.

    It takes the place of Lightning's summary of the model. Without a `run_dir` nothing is written.
    """

    def __init__(self, data: ImageNetDataModule, run_dir: Path | None) -> None:
        super().__init__()
        self.data = data
        self.run_dir = run_dir
        self._measured_from = 0.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # the others print nothing; before the module compiles its blocks
        if trainer.is_global_zero:
            self._gmacs = forward_gmacs(pl_module.model, network.input_shape(pl_module.hparams))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's summary would be printed here."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._first_step = self._last_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        warmup, steps, _ = pl_module.schedule_length()  # refuses a run without an end
        rows = self._rows(trainer, pl_module)
        if trainer.should_stop:  # before the first step
            del rows["length"]
        show(rows, f"training {self.run_dir.name}" if self.run_dir else "training")
        if has_schedule(trainer) and warmup >= steps and not trainer.should_stop:
            screen = console(highlight=False)
            screen.print(
                f"warning: the warm-up takes {warmup:,} steps "
                f"(--model.warmup_epochs {pl_module.settings.warmup_epochs:g}), "
                f"the run has {steps:,}: the learning rate only rises",
                soft_wrap=not screen.is_terminal,  # on one line in a log
            )

    def _rows(self, trainer: Trainer, pl_module: Any) -> dict[str, str]:
        data = self.data
        parameters = sum(parameter.numel() for parameter in pl_module.model.parameters())
        model = f"{network_name(pl_module.name, pl_module.hparams.get('fields'))}, {parameters:,} parameters"
        if self._gmacs:
            model += f", {self._gmacs:.3g} GMACs per image"
        order = f"{data.order.name.replace('published', 'shuffled')} by seed {data.seed}"
        if data.settings.repeats > 1:
            order += f", {data.settings.repeats} times each"
        decay = max(group.get("weight_decay", 0) for group in trainer.optimizers[0].param_groups)
        settings = pl_module.settings
        name = settings.optimizer
        if pl_module.overrides("configure_optimizers"):
            name = f"{type(trainer.optimizers[0]).__name__} of {type(pl_module).__name__}"
        optimizer = f"{name}, weight decay {decay:g}"
        if has_schedule(trainer) and settings.schedule != "cosine":
            optimizer += f", schedule {settings.schedule}"
        device = pl_module.device.type.replace("cuda", "GPU").upper()
        processes = trainer.world_size
        accumulated = batches_a_step(trainer)
        images = data.batch_size * processes * accumulated  # of an optimizer step
        noun = "processes" if processes > 1 else "process"
        batch = f"{images:,} = {processes} {noun} × {data.batch_size} images"
        if accumulated > 1:
            batch += f" × {accumulated} accumulated"
        rows = {
            "model": model,
            "data": data.summary(),
            "order": order,
            "decoding": data.how_read(),
            "batch": batch,
            "optimizer": optimizer,
            "length": _length(trainer, settings, images),
            "device": f"{device}, {trainer.precision}{attention_in_use(pl_module.model)}",
        }
        if self.run_dir:
            rows["folder"] = str(self.run_dir)
        return rows

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # gradients accumulate
        if trainer.global_step == self._last_step or not trainer.is_global_zero:
            return
        self._last_step = trainer.global_step
        done = self._last_step - self._first_step
        if done == MEASURED_STEPS.start:
            self._measured_from = time.monotonic()
        elif done == MEASURED_STEPS.stop:
            seconds = (time.monotonic() - self._measured_from) / len(MEASURED_STEPS)
            left = int(total_steps(trainer)) - self._last_step
            if left > 0:
                print(
                    f"{seconds:.2g} s a step: about {duration(left * seconds)} to go, and validation",
                    flush=True,
                )


def has_schedule(trainer: Trainer) -> bool:
    """Whether the rates are those of the settings; a `configure_optimizers` of the user's own may have others."""
    return any(
        isinstance(config.scheduler, WarmupSchedule) for config in trainer.lr_scheduler_configs
    )


def _length(trainer: Trainer, schedule: ScheduleSettings, images: int) -> str:
    peak = max(group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups)
    text = f"{int(total_steps(trainer)):,} steps; peak learning rate {peak:.3g}"
    if trainer.max_steps < 0:
        text = f"{trainer.max_epochs} epochs, {text}"
    if has_schedule(trainer) and schedule.lr_base_size is not None:
        text += f" = {schedule.lr:.3g} × {images:,} / {schedule.lr_base_size}"
    return text


def forward_gmacs(model: nn.Module, shape: Sequence[int]) -> float | None:
    """10⁹ multiply-adds of a network's forward pass on an image of `shape`; None if it cannot run without weights."""
    bare = {  # a copy may fill a GPU
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    try:
        with (
            torch.no_grad(),
            network.in_evaluation(model),
            FlopCounterMode(display=False) as counter,
        ):
            functional_call(model, bare, torch.empty(1, *shape, device="meta"))
        return counter.get_total_flops() / 2e9
    except Exception:  # a network of the user's own may do anything
        return None


def attention_in_use(model: nn.Module) -> str:
    """The backends of attention with talking heads, to put after the device; empty without any."""
    names = {
        str(layer.attention_backend)
        for layer in model.modules()
        if getattr(layer, "attention_backend", None)
    }
    return f", {', '.join(sorted(names))} attention" if names else ""


def show(rows: dict[str, str], title: str) -> None:
    """Print the rows in a frame on a terminal, as unwrapped lines in a file or a pipe."""
    console = rich.get_console()  # the console of the bar, which makes room above it
    if console.is_terminal:
        console.print(framed(rows.items(), title))
    else:
        print(*(f"{name:10}{printable(text)}" for name, text in rows.items()), sep="\n", flush=True)


def framed(rows: Iterable[tuple[str, str]], title: str) -> Panel:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return Panel(table, title=Text(printable(title)), title_align="left", expand=False)


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next."""

    def __init__(self, run: plugins.Run) -> None:
        self.run = run
        self.run_dir = run.folder
        self._guard = rundir.FolderGuard(run.folder)
        self._start = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": time.monotonic() - self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start -= round(state_dict["seconds"])  # those of the processes before

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, KeyboardInterrupt | SystemExit) or not trainer.is_global_zero:
            return
        line = "interrupted before the first checkpoint"
        if rundir.checkpoints(self.run_dir / rundir.CHECKPOINTS):
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            resume = self.run.program.command("resume", self.run_dir)
            line = f"{how} at step {trainer.global_step:,}; to continue: {resume}"
        elif self._guard.is_gone():
            line = f"interrupted; the run's folder {self.run_dir} has gone"
        print(line, flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and not self._guard.is_gone():
            rows = [*self._results(trainer), ("", ""), *self._commands(trainer)]
            console().print(framed(rows, f"run {self.run_dir.name}"))

    def _results(self, trainer: Trainer) -> list[tuple[str, str]]:
        checkpoints = self.run_dir / rundir.CHECKPOINTS
        step = trainer.global_step
        if step == self.run.first_step > 0:
            text = f"the run had ended at step {step:,}"
            if not _twice_as_long(trainer):
                text += "; to go on raise --trainer.max_time, or the patience of a stop"
            if unused := self.run.typed - LIMITS:
                text += f"; not used: {abbreviate(sorted(unused))}"
            rows = [("nothing to do", text)]
        else:
            rows = [("trained", f"to step {step:,} in {duration(time.monotonic() - self._start)}")]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
                weights, _, name = callback.metric.partition("/")
                form = "{:.2f} %" if name in ("acc1", "acc5", "acc1_macro") else "{:.4f}"
                text = f"{callback.metric} {form.format(float(callback.best_model_score))}"
                if callback.other_score is not None:
                    other = "raw weights" if weights == ckpt.VAL_EMA else "moving average"
                    text += f" (the {other} {form.format(callback.other_score)})"
                best = checkpoints / rundir.BEST
                rows.append(("best", f"{text}   {best if best.exists() else 'its file has gone'}"))
        with suppress(UserError):  # a damaged file of an earlier part of the run
            for table in plugins.results(self.run_dir):
                for what, *words, figure in table.rows:
                    rows.append((what, f"{table.head[-1]} {figure}   {', '.join(words)}"))
                if table.note:
                    rows.append(("note", table.note))
        last = checkpoints / rundir.LAST
        if last.exists():
            rows.append(("last", str(last)))
        metrics = self.run_dir / rundir.METRICS
        if metrics.exists():
            rows.append(("metrics", f"{metrics}, and TensorBoard's events"))
        return rows

    def _commands(self, trainer: Trainer) -> list[tuple[str, str]]:
        command = self.run.program.command
        rows = [("evaluate", command("eval", self.run_dir))]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            rows += getattr(callback, "suggestions", list)()
        rows += [
            (purpose, command(verb, self.run_dir))
            for purpose, verb in LOOKS.items()
            if verb in plugins.by_name("VERBS")
        ]
        if options := _twice_as_long(trainer):
            rows.append(("train longer", command("resume", self.run_dir, options)))
        folder = f"--logdir {shlex.quote(str(self.run_dir.parent))}"
        make = "make tensorboard"
        if rundir.run_argument(self.run_dir) != self.run_dir.name:  # outside logs/
            make += f' ARGS="{folder}"'
        return [*rows, ("watch all runs", to_type(make, f"tensorboard {folder}"))]


def _twice_as_long(trainer: Trainer) -> str:
    """The options of a resume that trains twice as long; empty if the run ended before its limits."""
    position = Position.now(trainer)
    limits = [
        ("max_epochs", trainer.max_epochs, position.epoch),
        ("max_steps", trainer.max_steps, position.step),
    ]
    return " ".join(
        f"--trainer.{name} {2 * end}" for name, end, done in limits if end and 0 < end <= done
    )

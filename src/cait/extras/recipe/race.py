"""A race: the recipe from scratch has a share of the time to be ahead of the solved head of a run from weights.

They are two runs. The one from weights is validated as step 0 and left there; the one from scratch trains in a folder
inside its folder. Whoever wins goes on from its last checkpoint, so nothing of the winner's is lost, and a killed race
is taken up where it was. The clock says who goes on, and changes no bit of either run.
"""

import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait import disk
from cait.extras.features import BATCH, evenly, extract
from cait.extras.recipe.rules import Recipe
from cait.extras.recipe.weights import INTERMEDIATES
from cait.plugins import Run
from cait.run import rundir
from cait.run.checkpoints import LastCheckpoint
from cait.run.program import NextRun
from cait.settings import Settings, flatten, is_in, nested

FILE, SCRATCH, WEIGHTS = "race.json", "scratch", "weights"
NAMES = {"acc1": 100.0, "acc1_macro": 100.0, "mAP": 1.0}
"""What a race may be about, and the value of a network without a mistake."""
LEAST_EPOCHS = 10
"""Before so many a figure from scratch tells little: of 1,000 digits it was 24 % after 5, 82 % after 10, then 97 %."""
UNLIKE = 0.38
"""How far images are from those of the weights where a race is due that nobody asked for, see benchmark.md."""
PLAIN = 1 / 2
"""The part of its share after which a run from scratch with less than half of the head's figure has lost."""

OF_WEIGHTS = {"model.name", "model.weights", "model.weights_ema", "model.pretrained"}
OF_WEIGHTS |= {"model.freeze", "model.freeze_norm", "model.solve_head", INTERMEDIATES}
"""Settings that a run from scratch does not take of those which are given."""
SHARED: Settings = {"baselines": False, "best_metric": None}
"""What the run from scratch takes from the other, and the values where that has none."""
PLACE = {"run_name", "ckpt_path", "trainer.default_root_dir", "race"}
LENGTH = {"trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.fast_dev_run"}


def enter(recipe: Recipe, scratch: Recipe, is_asked: bool) -> None:
    """Let a recipe from weights race against the one from scratch, if that gets anywhere in its share of the time.

    A race that is not asked for waits for a look at the images by the network.
    """
    seconds = share(recipe.minutes)
    if reason := _why_no_race(recipe, scratch, seconds):
        recipe.note("race", f"none, because {reason}")
        return
    race = {
        "seconds": seconds,
        "settings": nested(
            scratch.held
            | {name: recipe.held.get(name, default) for name, default in SHARED.items()}
        ),
    }
    text = f"after the head is solved, from scratch gets {seconds:.0f} s to be ahead of it"
    if not is_asked:
        race["unlike"] = UNLIKE
        text += " where the images are unlike those of the weights"
    recipe.take("race", race)
    recipe.note("race", text)


def _why_no_race(recipe: Recipe, scratch: Recipe, seconds: float) -> str:
    """Why the recipe from scratch cannot win in so many seconds; empty if it may."""
    metric = str(recipe.held.get("best_metric") or "val/acc1")
    epochs = seconds / 60 / recipe.minutes * scratch.held.get("trainer.max_epochs", 0)
    if lengths := LENGTH & recipe.given.keys():
        return f"--{min(lengths)} is given, and a race goes by the time"
    if metric.rpartition("/")[2] not in NAMES:
        return f"it is about {', '.join(NAMES)}, and not about {metric}"
    if not scratch.held.get("plan_minutes") or epochs < LEAST_EPOCHS:
        return f"from scratch {epochs:.1f} epochs would fit into its share of the time, {seconds:.0f} s"
    if not recipe.held.get("plan_minutes"):
        return "the head alone is trained"
    return ""


def callbacks_of(run: Run) -> list[Callback]:
    """What races in a run, if its race is not over."""
    if "settings" in run.config.race:
        return [Race(run)]
    # of the one from weights
    is_inside = run.folder.name == SCRATCH and (run.folder.parent / rundir.CONFIG).is_file()
    return [RaceFromScratch(run)] if is_inside and not winner(run.folder.parent) else []


def share(minutes: float) -> float:
    """The seconds that the run from scratch has: 30 % of up to 3 minutes, 16 % of 10."""
    return 0.3 * 60 * min(minutes, math.sqrt(3 * minutes))


def noise(one: float, other: float, images: int) -> float:
    """The standard deviation of the difference of two shares of so many images."""
    return math.sqrt((one * (1 - one) + other * (1 - other)) / images)


def unlikeness(network: nn.Module, samples: Any, data: Any, device: torch.device) -> float | None:
    """How far images are from those that a network was trained on; None without BatchNorm, which tells it.

    Its layers keep the means of what they were trained on ("Revisiting Batch Normalization For Practical Domain
    Adaptation", Li et al., 2016): by how many deviations a batch differs from them, averaged over channels and layers.
    """
    distances: list[float] = []

    def note(norm: Any, inputs: Any) -> None:
        means = inputs[0].float().transpose(0, 1).flatten(1).mean(1)
        deviations = (norm.running_var + norm.eps).sqrt()
        distances.append(float(((means - norm.running_mean).abs() / deviations).mean()))

    with ExitStack() as hooks:
        for layer in network.modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                hooks.enter_context(layer.register_forward_pre_hook(note))
        extract(network, samples, data, device, evenly(len(samples), BATCH))
    return statistics.fmean(distances) if distances else None


def verdict(head: float, scratch: float, images: int, part: float, epochs: int) -> str:
    """Who has won, WEIGHTS or SCRATCH, empty if nobody has yet, by the figures of both in [0, 1].

    The run from scratch has had this `part` of its share of the time, and trained so many epochs.
    """
    if scratch - head > noise(head, scratch, images):
        return SCRATCH
    is_plain = part >= PLAIN and epochs >= LEAST_EPOCHS and scratch < head / 2
    return WEIGHTS if part >= 1 or is_plain else ""


def leave(trainer: Trainer, folder: Path, settings: Any = None, typed: Any = None) -> NoReturn:
    """End this run, as it is saved, and go on with the one in `folder`.

    If it is new it begins with `settings`; what is `typed` now wins over these and over its own.
    """
    for callback in LastCheckpoint.among(trainer):
        callback.signals.restore()  # nobody would act on what it notes
    # the others wait for the first here
    is_begun = trainer.strategy.broadcast((folder / rundir.CONFIG).is_file())
    raise NextRun(folder, not is_begun, {} if is_begun else settings, typed or {})


class Race(Callback):
    """Of the run from weights: after step 0 it lets the run from scratch try, once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name = run.config.best_metric.rpartition("/")[2]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step or not pl_module.validates_first or self.name not in NAMES:
            return
        folder = self.run.folder
        winning = trainer.strategy.broadcast(winner(folder))
        if winning == SCRATCH:  # a kill came before it was in this place
            give_place(trainer, folder)
        if winning:
            return
        score = float(trainer.callback_metrics[f"val/{self.name}"])
        if reason := self._why_no_race(trainer, pl_module, score / NAMES[self.name]):
            rank_zero_info(f"no race: {reason}")
            return
        race = self.run.config.race
        rank_zero_info(
            f"race: from scratch has {race['seconds']:.0f} s to be ahead by more than the noise"
        )
        settings = {**race["settings"], "run_name": SCRATCH}
        settings["trainer"] = settings.get("trainer", {}) | {"default_root_dir": str(folder)}
        seconds = time.monotonic() - self.run.program.begun
        settings["race"] = {
            "score": score,
            "after": trainer.strategy.broadcast(seconds),  # settings are those of process 0
            "seconds": race["seconds"],
        }
        typed = {
            name: value
            for name, value in flatten(self.run.config.as_dict()).items()
            if is_in(name, self.run.typed) and not is_in(name, OF_WEIGHTS | PLACE)
        }
        leave(trainer, folder / SCRATCH, settings, nested(typed))

    def _why_no_race(self, trainer: Trainer, pl_module: Any, head: float) -> str:
        """Why nobody could win against the share of right images of the head, or a race is not due; empty if it is."""
        data = self.run.data
        images = len(data.val_images)
        if head + noise(head, 1, images) >= 1:
            return f"without a mistake on {images:,} images nobody is ahead by more than the noise"
        least = self.run.config.race.get("unlike")
        if not least:
            return ""
        distance = unlikeness(pl_module.model, data.train_images.samples, data, pl_module.device)
        if distance is None:
            return "only BatchNorm tells how unlike the images are; --race true has one"
        if trainer.strategy.broadcast(distance < least):
            return (
                f"by BatchNorm the images are like those of the weights, {distance:.2f} < {least}"
            )
        return ""


class RaceFromScratch(Callback):
    """Of the run from scratch: after each validation, whether it is ahead, or its time is over."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name = run.config.best_metric.rpartition("/")[2]
        self.begun = time.monotonic()
        self.best = -1.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": time.monotonic() - self.begun, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun = self.begun - state_dict["seconds"]
        self.best = state_dict["best"]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.best = max(self.best, float(trainer.callback_metrics[f"val/{self.name}"]))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._judge(trainer, False)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._judge(trainer, True)  # all its epochs fit into its share

    def _judge(self, trainer: Trainer, is_over: bool) -> None:
        if self.best < 0:
            return
        folder = self.run.folder.parent
        race = self.run.config.race
        perfect = NAMES[self.name]
        seconds = time.monotonic() - self.begun
        winning = trainer.strategy.broadcast(
            verdict(
                head=race["score"] / perfect,
                scratch=self.best / perfect,
                images=len(self.run.data.val_images),
                part=1.0 if is_over else seconds / race["seconds"],
                epochs=trainer.current_epoch,
            )
        )
        if not winning:
            return
        rank_zero_info(
            f"race won by {winning}: val/{self.name} of the solved head {race['score']:.4g} "
            f"after {race['after']:.0f} s, from scratch {self.best:.4g} after {seconds:.0f} s"
        )
        if trainer.is_global_zero:
            disk.write_json(
                folder / FILE, {"winner": winning, "best": self.best, "seconds": seconds, **race}
            )
        if winning == SCRATCH:
            give_place(trainer, folder)
        leave(trainer, folder)


def winner(folder: Path) -> str:
    """Who has won the race of a run, WEIGHTS or SCRATCH; empty if it is not over."""
    try:
        return disk.read_json(folder / FILE, {"winner": str})["winner"]
    except OSError:
        return ""


def give_place(trainer: Trainer, folder: Path) -> NoReturn:
    """Put the run from scratch in the place of the one from weights, and go on with it.

    Its configuration comes before its checkpoints: after a kill in between it begins anew, with the same bits.
    """
    if trainer.is_global_zero:
        inside = folder / SCRATCH
        for path in (*folder.glob(f"{rundir.CHECKPOINTS}/*.ckpt"), *folder.glob("events.out.*")):
            path.unlink()
        paths = [path for path in inside.rglob("*") if path.is_file() and path.name != rundir.LOCK]
        for path in sorted(paths, key=lambda path: path.name != rundir.CONFIG):
            path.replace(folder / path.relative_to(inside))
    leave(trainer, folder)

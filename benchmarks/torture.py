"""Kill or stop a run at random moments, resume it each time, and compare its end with that of a run left alone.

    python benchmarks/torture.py --kills 50 [--processes 4] [--accelerator gpu] [--seed 0] [--out benchmarks/torture.md]

Other options, such as `--data.num_workers 0`, are settings of the killed runs; the run left alone does not have them.

The run is the digits configuration, shorter, with loader workers, Mixup and CutMix, stochastic
depth, a moving average, accumulated gradients and a checkpoint every few steps. A kill is SIGKILL,
to the main process or to its whole group, at a moment drawn over the length of the run, or as soon
as a checkpoint is being written. Every other interruption is a stop at a random batch, in one of three
hooks: all processes get SIGTERM, or a callback sets `trainer.should_stop` or raises an error. A run that
ends before its interruption is compared, and another begun. Several processes train a smaller network
for fewer steps, without loader processes, because they may outnumber the cores. Compared are weights,
moving average, optimizer, schedule, counters, `metrics.csv` and TensorBoard's scalars, all to the last
bit; of a run that `should_stop` ended, and so validated once more, all but the validations. On GPUs the
runs are made with --trainer.deterministic true.
"""

import argparse
import csv
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from report import REPO, stamp
from same import same

EPOCHS = 4
RECIPE = [
    f"--config={REPO / 'configs/digits.yaml'}",
    f"--trainer.max_epochs={EPOCHS}",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.log_every_n_steps=1",
    "--data.num_workers=2",
    "--data.mix_prob=0.8",
    "--data.eval_batch_size=8",  # a validation long enough to be hit
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
    "--save_every_n_steps=3",
    "--trainer.callbacks+=torture.Stop",
]
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_validation_end")
STOP = "TORTURE_STOP"
"""The environment's variable that tells `Stop` where and how to stop, as "on_train_batch_end 37 stop"."""
WAYS = ("SIGTERM", "SIGTERM", "stop", "raise")


class Stop(Callback):
    """End training in a hook once so many batches are done, in one of `WAYS`."""

    def __init__(self) -> None:
        if STOP in os.environ:
            hook, self.batches, self.how = os.environ[STOP].split()
            setattr(self, hook, self.stop)

    def stop(self, trainer: Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if done >= int(self.batches) and not trainer.sanity_checking:
            if self.how == "raise":
                raise RuntimeError("as a callback of your own may")
            trainer.should_stop |= self.how == "stop"
            if self.how == "SIGTERM" and trainer.is_global_zero:
                os.killpg(os.getpgrp(), signal.SIGTERM)
                self.how = "stopping"


class Job:
    """`cait` in a folder, in a process group of its own."""

    def __init__(self, folder: Path, arguments: list[str], stop: str = "") -> None:
        self.folder = folder
        self.log = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cait", *arguments],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": f"{REPO / 'src'}:{REPO / 'benchmarks'}"}
            | ({STOP: stop} if stop else {}),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.begun = time.monotonic()

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-2000:]

    def kill(self, group: bool) -> None:
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> float:
        """Seconds to a good end."""
        if self.process.wait(timeout=1800) != 0:
            raise SystemExit(f"the run ended with {self.process.returncode}:\n{self.output()}")
        return time.monotonic() - self.begun


def start(folder: Path, name: str, recipe: list[str], stop: str = "") -> Job:
    """Resume the run where it can be, else begin it."""
    if any((folder / "logs" / name / "checkpoints").glob("*.ckpt")):
        return Job(folder, ["resume", name], stop)
    return Job(folder, ["fit", *recipe, f"--run_name={name}"], stop)


def steps_done(run: Path) -> int:
    path = run / "checkpoints/last.ckpt"
    return torch.load(path, weights_only=True)["global_step"] if path.exists() else 0


def kill_somewhere(
    job: Job, run: Path, draw: random.Random, length: float, processes: int
) -> str | None:
    """Kill the job at a moment of its life; None where it ended before."""
    group = processes > 1 or draw.random() < 0.5
    saving = draw.random() < 0.25
    # A quarter of the kills in the first seconds: imports, data, restoring.
    moment = draw.uniform(0, 0.25 * length if draw.random() < 0.25 else length)
    checkpoints = run / "checkpoints"
    while job.process.poll() is None:
        late = time.monotonic() - job.begun >= moment
        if late and (not saving or any(checkpoints.glob(".last.ckpt.*"))):
            job.kill(group)
            where = "while saving" if any(checkpoints.glob(".last.ckpt.*")) else "anywhere"
            seconds = time.monotonic() - job.begun
            return (
                f"{seconds:.1f} s after its start, {where}, {'group' if group else 'main process'}"
            )
        time.sleep(0.0005 if saving else 0.01)
    job.wait()
    return None


def outcome(run: Path, validations: bool = True) -> dict[str, Any]:
    """All that a run has come to, or all that does not depend on how often it was validated."""
    # tests import this file
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    if not validations:
        scalars = {
            tag: points for tag, points in scalars.items() if tag.startswith(("train/", "lr"))
        }
    rows = [
        row
        for row in csv.DictReader((run / "metrics.csv").open())
        if validations or row["train/loss"]
    ]
    best = {
        "best weights": torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    }
    return {
        "weights": checkpoint["state_dict"],
        "moving average": checkpoint["callbacks"]["EMA"],
        "optimizer": checkpoint["optimizer_states"],
        "schedule": checkpoint["lr_schedulers"],
        "step": (checkpoint["epoch"], checkpoint["global_step"]),
        "metrics.csv": rows,
        "TensorBoard": scalars,
    } | (best if validations else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    options, settings = parser.parse_known_args()
    # it warns of every restart that it sees
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    draw = random.Random(options.seed)
    recipe = [
        *RECIPE,
        f"--trainer.accelerator={options.accelerator}",
        f"--trainer.devices={options.processes}",
    ]
    if options.processes > 1:
        recipe += [
            "--trainer.strategy=ddp",
            f"--data.batch_size={8 * options.processes}",
            "--data.num_workers=0",
        ]
        recipe += ["--model.fields.depth=2", "--model.fields.embed_dim=32"]
        recipe += ["--trainer.limit_train_batches=24", "--trainer.limit_val_batches=8"]
    if options.accelerator == "gpu":
        recipe += ["--trainer.deterministic=true"]
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    length = start(folder, "alone", recipe).wait()
    expected = outcome(folder / "logs/alone")
    print(f"left alone: {length:.0f} s to step {expected['step'][1]}", flush=True)

    batches = 2 * expected["step"][1]
    kills, stops, runs, differing = 0, 0, 0, []
    while kills + stops < options.kills or runs == 0:
        runs += 1
        name, stopped = f"killed-{runs}", False
        run = folder / "logs" / name
        while True:
            stop = ""
            if kills + stops < options.kills and stops < kills:
                way = draw.choice(WAYS)
                begun = min(2 * steps_done(run), batches - 1)  # it may have been killed at its end
                stop = f"{draw.choice(HOOKS)} {draw.randrange(begun, batches)} {way}"
            job = start(folder, name, [*recipe, *settings], stop)
            if stop:
                job.process.wait(timeout=1800)
                if steps_done(run) == expected["step"][1] and job.process.returncode == 0:
                    break
                stops, stopped = stops + 1, stopped or way == "stop"
                print(f"stop {stops}: {name}, {stop}, at step {steps_done(run)}", flush=True)
            elif kills + stops < options.kills:
                if not (how := kill_somewhere(job, run, draw, length, options.processes)):
                    break
                kills += 1
                print(f"kill {kills}: {name}, {how}", flush=True)
            else:
                job.wait()
                break
        got = outcome(run, validations=not stopped)
        alone = outcome(folder / "logs/alone", validations=not stopped)
        wrong = [part for part, value in alone.items() if not same(value, got[part])]
        print(
            f"{name}: {'differs in ' + ', '.join(wrong) if wrong else 'the same to the last bit'}",
            flush=True,
        )
        differing += wrong
    how = f"{options.processes} process(es), {options.accelerator}, seed {options.seed}"
    more = f", {' '.join(settings)}" if settings else ""
    ended = (
        f"DIFFERENT in {', '.join(sorted(set(differing)))}"
        if differing
        else "every run ended with the same bits"
    )
    verdict = f"{kills} kills and {stops} stops in {runs} runs of {how}{more}: {ended}"
    print(verdict)
    if options.out:
        with options.out.open("a") as file:
            file.write(f"- {stamp()}: {verdict}\n")
    if differing:
        raise SystemExit(f"left for inspection: {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

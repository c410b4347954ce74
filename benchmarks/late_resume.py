"""How long a resume takes late in a long run, beside one after the first epoch.

    python benchmarks/late_resume.py [--steps 500000] [--rounds 5] [--out benchmarks/logging_cost.md]

A run of one epoch on the digits is copied, and the copy is made old: the counters of its checkpoint and the rows of its
metrics.csv are those of so many steps. Both are resumed for one more step, in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import REPO, add, stamp
from torture import Job

from cait.run.checkpoints import DurableCheckpointIO
from cait.run.loggers import RunCSVWriter

LOGGED = 50
"""Steps from one row of metrics.csv to the next."""


def last(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)


def older(part: Any, times: int, name: str = "") -> Any:
    """Lightning's counters after `times` as many epochs; `current` counts within one."""
    if isinstance(part, dict):
        return {
            key: value if key == "current" and "epoch_progress" not in name else older(value, times, f"{name}.{key}")
            for key, value in part.items()
        }
    return part * times if type(part) is int else part


def age(run: Path, steps: int) -> int:
    """Make a run of one epoch as old as `steps`, in whole epochs. Returns its steps."""
    checkpoint = last(run)
    times = steps // checkpoint["global_step"]
    for name in ("epoch", "global_step"):
        checkpoint[name] *= times
    checkpoint["loops"] = {name: older(loop, times, name) for name, loop in checkpoint["loops"].items()}
    for schedule in checkpoint["lr_schedulers"]:
        schedule["last_epoch"] *= times
    for optimizer in checkpoint["optimizer_states"]:
        for state in optimizer["state"].values():
            state["step"] *= times
    DurableCheckpointIO().save_checkpoint(checkpoint, run / "checkpoints/last.ckpt")
    table = RunCSVWriter(str(run))
    row = next(row for row in table.rows_before(float("inf")) if row["train/loss"])
    table.replace_rows([row | {"step": step} for step in range(0, checkpoint["global_step"], LOGGED)], list(row))
    return checkpoint["global_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe = [f"--config={REPO / 'configs/digits.yaml'}", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
        Job(folder, ["fit", *recipe, "--run_name=begun", "--model.warmup_epochs=0.1"]).wait()
        shutil.copytree(folder / "logs/begun", folder / "logs/old")
        reached = {"begun": last(folder / "logs/begun")["global_step"], "old": age(folder / "logs/old", options.steps)}
        took: dict[str, list[float]] = {"begun": [], "old": []}
        for _ in range(options.rounds):
            for name, steps in reached.items():
                shutil.rmtree(folder / "logs/trial", ignore_errors=True)
                shutil.copytree(folder / "logs" / name, folder / "logs/trial")
                more = ["--trainer.max_epochs=-1", f"--trainer.max_steps={steps + 1}", "--trainer.limit_val_batches=1"]
                took[name].append(Job(folder, ["resume", "trial", *more]).wait())
                after = last(folder / "logs/trial")["global_step"]
                if after != steps + 1:
                    raise SystemExit(f"the resumed run is at step {after}, not {steps + 1}")
    begun, old = (statistics.median(took[name]) for name in ("begun", "old"))
    line = (
        f"`cait resume` for one more step takes {begun:.1f} s after step {reached['begun']} and {old:.1f} s after step "
        f"{reached['old']:,}, with {reached['old'] // LOGGED + 1:,} rows of metrics.csv (medians of {options.rounds})"
    )
    print(f"{stamp()}: {line}")
    add(options.out, line)


if __name__ == "__main__":
    main()

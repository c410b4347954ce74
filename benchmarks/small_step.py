"""A step of `make train` beside a plain loop over the same network, alone and with a busy loop on each core.

    python benchmarks/small_step.py [--steps 300] [--rounds 3] [--out benchmarks/small_step.md]

Ours is `cait fit --config configs/digits.yaml` as a user starts it: loader, metrics, loggers, checks, progress. The
plain loop is the same network, batch and AdamW on one batch that is there already, with PyTorch's own defaults.
They take turns, each in a process of its own. A step is the time from one to the next; its median is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

BUSY = "while True: pass"
FIRST = 30
"""Steps at the start that are not counted: workers start, memory is taken."""
OUT = "SMALL_STEP_OUT"


class Times(Callback):
    """Write the time at which each step begins."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        Path(os.environ[OUT]).write_text(json.dumps(self.starts))


def plain(steps: int) -> None:
    import torch
    from report import DIGITS
    from torch.nn.functional import cross_entropy

    import cait

    model = cait.create_model("xxs24", img_size=16, num_classes=10, drop_path_rate=0.05, **DIGITS).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    starts = []
    for _ in range(steps):
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    Path(os.environ[OUT]).write_text(json.dumps(starts))


def median_ms(side: str, steps: int, folder: Path) -> float:
    out = folder / "starts.json"
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parent.parent / "src")])
    commands = {
        "plain": [sys.executable, str(here), "--plain", "--steps", str(steps)],
        "ours": [
            *(sys.executable, "-m", "cait", "fit", "--config", str(here.parent.parent / "configs/digits.yaml")),
            *(f"--trainer.max_steps={steps}", "--trainer.callbacks+=small_step.Times"),
        ],
    }
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {OUT: str(out), "PYTHONPATH": path}
    subprocess.run(commands[side], cwd=folder, env=environment, check=True, capture_output=True)
    starts = json.loads(out.read_text())[FIRST:]
    return 1e3 * statistics.median(end - begin for begin, end in pairwise(starts))


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    jobs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(loops)]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    options = parser.parse_args()
    if options.plain:
        plain(options.steps)
        return
    from report import add, stamp

    for loops in (0, os.cpu_count() or 1):
        rounds = []
        with tempfile.TemporaryDirectory() as folder, busy(loops):
            median_ms("ours", FIRST + 5, Path(folder))  # writes the digits
            for _ in range(options.rounds):
                rounds.append({side: median_ms(side, options.steps, Path(folder)) for side in ("plain", "ours")})
        found = {side: statistics.median(each[side] for each in rounds) for side in ("plain", "ours")}
        ratios = [each["ours"] / each["plain"] for each in rounds]
        where = f"beside {loops} busy loops" if loops else "alone"
        line = (
            f"{where}: plain loop {found['plain']:.0f} ms, "
            f"`make train` {found['ours']:.0f} ms, {statistics.median(ratios):.2f} times "
            f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        )
        print(f"{stamp()}: {line}", flush=True)
        add(options.out, line)


if __name__ == "__main__":
    main()

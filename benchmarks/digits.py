"""Train the digits configuration and write what came out to benchmarks/digits.md.

    python benchmarks/digits.py [--seeds 3]          several seeds, as `make train` runs them
    python benchmarks/digits.py --devices 1 2 4 8    seed 0 on so many processes, on the CPU

The file has validation accuracy after the last epoch and of the best one, time, hardware, date and
commit. Each command rewrites its own part. The accuracy is a figure of the configuration, not of a
chosen seed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import stamp

HERE = Path(__file__).parent
CONFIG = "configs/digits.yaml"
ON_SEVERAL = "## On several processes"


def train(seed: int, root: str, settings: Sequence[str] = ()) -> tuple[float, float, float]:
    """(last val/acc1, best val/acc1, seconds) of one run."""
    start = time.monotonic()
    command = [sys.executable, "-m", "cait", "fit", "--config", CONFIG, "--run_name", f"seed{seed}"]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", root, *settings]
    subprocess.run(command, cwd=HERE.parent, check=True)
    with (Path(root) / f"seed{seed}" / "metrics.csv").open() as file:
        scores = [float(row["val/acc1"]) for row in csv.DictReader(file) if row["val/acc1"]]
    return scores[-1], max(scores), time.monotonic() - start


def on_processes(count: int) -> tuple[float, float, float]:
    """`train` with seed 0 on `count` processes."""
    settings = ["--trainer.accelerator=cpu", f"--trainer.devices={count}", "--data.num_workers=0"]
    with tempfile.TemporaryDirectory() as root:
        return train(0, root, settings)


def table(name: str, runs: dict[int, tuple[float, float, float]]) -> list[str]:
    return [
        f"| {name} | val/acc1, last epoch | val/acc1, best epoch | seconds, start-up included |",
        "|---|---|---|---|",
        *(f"| {key} | {last:.2f} | {best:.2f} | {seconds:.0f} |" for key, (last, best, seconds) in runs.items()),
        "",
    ]


def seeds_part(count: int) -> str:
    with tempfile.TemporaryDirectory() as root:
        runs = {seed: train(seed, root) for seed in range(count)}
    last = [run[0] for run in runs.values()]
    lines = [
        "# Digits: accuracy of `make train`",
        "",
        f"`python benchmarks/digits.py --seeds {count}`, {stamp()}. 360 validation images: one image is 0.28 points.",
        "",
        *table("seed", runs),
        f"Mean of the last epochs {statistics.mean(last):.2f}, lowest {min(last):.2f}.",
    ]
    return "\n".join(lines) + "\n"


def devices_part(counts: Sequence[int]) -> str:
    lines = [
        ON_SEVERAL,
        "",
        f"`python benchmarks/digits.py --devices {' '.join(map(str, counts))}`, {stamp()}. Seed 0; the batch is 32 "
        "images over all processes. The processes share the cores, so the seconds are no measure of speed.",
        "",
        *table("processes", {count: on_processes(count) for count in counts}),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+")
    given = parser.parse_args()
    path = HERE / "digits.md"
    seeds, _, several = path.read_text().partition(f"\n{ON_SEVERAL}")
    several = f"{ON_SEVERAL}{several}" if several else ""
    if given.devices:
        several = devices_part(given.devices)
    else:
        seeds = seeds_part(given.seeds)
    path.write_text(f"{seeds.rstrip()}\n" + (f"\n{several.rstrip()}\n" if several else ""))
    print(path.read_text())


if __name__ == "__main__":
    main()

"""Train the digits configuration with several seeds and write what came out.

    python benchmarks/digits.py [--seeds 3]

Writes benchmarks/digits.md: validation accuracy after the last epoch and of the best one, time,
hardware, date and commit. The accuracy is a figure of the configuration, not of a chosen seed.
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


def train(seed: int, root: str, settings: Sequence[str] = ()) -> tuple[float, float, float]:
    """(last val/acc1, best val/acc1, seconds) of one run."""
    start = time.monotonic()
    command = [sys.executable, "-m", "cait", "fit", "--config", CONFIG, "--run_name", f"seed{seed}"]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", root, *settings]
    subprocess.run(command, cwd=HERE.parent, check=True)
    with (Path(root) / f"seed{seed}" / "metrics.csv").open() as file:
        scores = [float(row["val/acc1"]) for row in csv.DictReader(file) if row["val/acc1"]]
    return scores[-1], max(scores), time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as root:
        runs = [train(seed, root) for seed in seeds]
    last = [run[0] for run in runs]
    lines = [
        "# Digits: accuracy of `make train`",
        "",
        f"`python benchmarks/digits.py --seeds {len(runs)}`, {stamp()}. "
        f"360 validation pictures: one picture is 0.28 points.",
        "",
        "| seed | val/acc1, last epoch | val/acc1, best epoch | seconds, start-up included |",
        "|---|---|---|---|",
        *(f"| {seed} | {a:.2f} | {b:.2f} | {s:.0f} |" for seed, (a, b, s) in zip(seeds, runs, strict=True)),
        "",
        f"Mean of the last epochs {statistics.mean(last):.2f}, lowest {min(last):.2f}.",
    ]
    (HERE / "digits.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

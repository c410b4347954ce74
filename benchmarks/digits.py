"""Train the digits configuration with several seeds, as `make train` does, and write benchmarks/digits.md.

    python benchmarks/digits.py [--seeds 3]

The file has validation accuracy after the last epoch and of the best one, time, hardware, date and
commit. The accuracy is a figure of the configuration, not of a chosen seed.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import show, stamp

HERE = Path(__file__).parent
CONFIG = "configs/digits.yaml"


def train(seed: int, root: str) -> tuple[float, float, float]:
    """(last val/acc1, best val/acc1, seconds) of one run."""
    start = time.monotonic()
    command = [sys.executable, "-m", "cait", "fit", "--config", CONFIG, "--run_name", f"seed{seed}"]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", root]
    subprocess.run(command, cwd=HERE.parent, check=True)
    with (Path(root) / f"seed{seed}" / "metrics.csv").open() as file:
        scores = [float(row["val/acc1"]) for row in csv.DictReader(file) if row["val/acc1"]]
    return scores[-1], max(scores), time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    count = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as root:
        runs = {seed: train(seed, root) for seed in range(count)}
    last = [run[0] for run in runs.values()]
    lines = [
        "# Digits: accuracy of `make train`",
        "",
        f"`python benchmarks/digits.py --seeds {count}`, {stamp()}. 360 validation images: one image is 0.28 points.",
        "",
        "| seed | val/acc1, last epoch | val/acc1, best epoch | seconds, start-up included |",
        "|---|---|---|---|",
        *(
            f"| {seed} | {last:.2f} | {best:.2f} | {seconds:.0f} |"
            for seed, (last, best, seconds) in runs.items()
        ),
        "",
        f"Mean of the last epochs {statistics.mean(last):.2f}, lowest {min(last):.2f}.",
    ]
    show(lines, HERE / "digits.md")


if __name__ == "__main__":
    main()

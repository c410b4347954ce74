"""Whether a network learns as well from smaller files and from raw pixels.

    python benchmarks/ways.py FOLDER --max_side 96 [--seeds 3] [--epochs 8] [--out benchmarks/ways.md]

FOLDER is a folder of class folders. A small CaiT trains with RandAugment at 64 pixels, or on the digits at 16, in each
way with each seed. Reported is the accuracy after the last epoch.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import REPO, add


def last_accuracy(run: Path) -> float:
    """Of validation, in percent."""
    with (run / "metrics.csv").open() as file:
        return float([row["val/acc1"] for row in csv.DictReader(file) if row.get("val/acc1")][-1])


def cait(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "cait", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--max_side", type=int, default=96)
    parser.add_argument("--ways", nargs="+", help="some of them, by their first words; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    given = parser.parse_args()
    root, side = given.root.resolve(), ["--data.img_size=16"]
    if root.name != "digits":
        side = ["--data.img_size=64", "--model.fields.patch_size=8", "--data.scale=[0.35,1.0]", "--data.hflip=0.5"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = {"smaller": [f"--max_side={given.max_side}"], "raw": ["--raw"], "whole": []}
        for name, how in made.items():
            cait(folder, "shards", str(root), str(folder / name), *how)
        # all ways read shards of one division into training and validation
        ways = {
            "default": ["whole"],
            f"at most {given.max_side} pixels": ["smaller"],
            "raw": ["raw"],
        }
        chosen = {name: how for name, how in ways.items() if not given.ways or name.startswith(tuple(given.ways))}
        for name, (place, *settings) in chosen.items():
            found = []
            for seed in range(given.seeds):
                run = f"{'-'.join(name.replace(',', '').split())}-{seed}"
                how = [f"--seed_everything={seed}", f"--trainer.max_epochs={given.epochs}", "--trainer.accelerator=cpu"]
                about = [f"--run_name={run}", "--data.auto_augment=rand-m9-mstd0.5-inc1", *how, *side, *settings]
                cait(folder, "fit", f"--config={REPO / 'configs/digits.yaml'}", f"--data.root={folder / place}", *about)
                found.append(last_accuracy(folder / "logs" / run))
            listed = ", ".join(f"{each:.2f}" for each in found)
            spread = f"mean {statistics.mean(found):.2f}, deviation {statistics.stdev(found):.2f}"
            line = f"{root.name}, {given.epochs} epochs, {name}: {spread} ({listed})"
            print(line, flush=True)
            add(given.out, line)


if __name__ == "__main__":
    main()

"""Everything that wants a GPU, in one call and under nine minutes: the tests of the kernels, then the measurements.

    python benchmarks/gpu.py [--out benchmarks]

Needs torch and timm alone (and Lightning for the last), with `src` on PYTHONPATH. Without a GPU it
says so and does nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from report import REPO

SECONDS = 520
TAX = ["benchmarks/tax.py", "--rounds", "7", "--backend", "recompute", "fused"]
STEP = ["benchmarks/step.py", "--rounds", "7"]


def jobs(out: Path) -> list[list[str]]:
    """The most wanted first: what the time does not suffice for is left out and said."""
    files = ["--out", str(out)]
    return [
        ["-m", "pytest", "-m", "", "tests/test_fused.py", "tests/test_model.py", "tests/test_gpu.py"],
        ["benchmarks/kernel.py", *files],
        [*TAX, "--batch", "128", "--cases", "s24-224", "s24-224-compiled", *files, "--tag", "224"],
        [*TAX, "--batch", "32", "--cases", "s24-384", *files, "--tag", "384"],
        ["benchmarks/profile_step.py", "--batch", "128", *files],
        [*STEP, "--batch", "256", "--cases", "s24-224", "xxs24-224", *files, "--tag", "eager"],
        [*STEP, "--batch", "256", "--cases", "s24-224-compiled", *files, "--tag", "compiled"],
        [*STEP, "--batch", "64", "--cases", "s24-384", *files, "--tag", "384"],
        ["benchmarks/survival_cost.py", "--model", "s24", "--batch", "128", "--out", str(out / "survival_cost.md")],
        ["benchmarks/kernel.py", "--shapes", "8x196", "4x196", "--tune"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks", help="folder for the results")
    out = parser.parse_args().out.resolve()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was run")
        return
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(REPO / "src")}
    end, failed = time.monotonic() + SECONDS, []
    for job in jobs(out):
        left = end - time.monotonic()
        words = " ".join(job)
        if left < 30:
            print(f"no time left for: {words}", flush=True)
            continue
        print(f"== {words}", flush=True)
        try:
            if subprocess.run([sys.executable, *job], cwd=REPO, env=environment, timeout=left).returncode:
                failed.append(words)
        except subprocess.TimeoutExpired:
            failed.append(f"{words} (out of time)")
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()

"""What finishing a batch on the CPU takes, with torch's memory in large pages, as `cait` asks for, and without.

    python benchmarks/finish.py [--rounds 7] [--out FILE]

Bytes of 128 images of 224 × 224 become float32, normalised, on one core. Each turn is a process of its own, because
torch reads the setting once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from report import REPO, add

TURN = """
import time
import torch
from cait.data.transforms import NormalizeAndErase, Preprocessing
torch.set_num_threads(1)
images = torch.randint(0, 256, (128, 224, 224, 3), dtype=torch.uint8)
finish = NormalizeAndErase(Preprocessing().mean, Preprocessing().std)
times = []
for _ in range(9):
    begin = time.process_time()
    finish(images)
    times.append(time.process_time() - begin)
print(sorted(times)[4] / 128)
"""


def seconds(large: str) -> float:
    """Of a processor, for an image."""
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": large, "PYTHONPATH": str(REPO / "src")}
    done = subprocess.run([sys.executable, "-c", TURN], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    given = parser.parse_args()
    pairs = [(seconds("0"), seconds("1")) for _ in range(given.rounds)]
    small, large = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(with_ / without for without, with_ in pairs)
    line = (
        f"{given.rounds} rounds: {small:.0f} µs an image in small pages, {large:.0f} in large ones, {ratio:.2f} of it"
    )
    print(line)
    add(given.out, line)


if __name__ == "__main__":
    main()

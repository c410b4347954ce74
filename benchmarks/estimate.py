"""The length that a chosen recipe prints, beside what its run takes from the command to its end.

    python benchmarks/estimate.py FOLDER [FOLDER ...] [--minutes 3] [--out FILE] [-- --model.name timm/resnet10t]

Each folder is trained on once, below a temporary folder; what follows `--` goes to each run. A line says the load of
the machine (processes that want a core, the mean of a minute) before and after the run: an estimate cannot know what
else will run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import REPO, add

from cait.extras.clock import duration

UNITS = {"h": 3600, "min": 60, "s": 1}


def seconds(text: str) -> int:
    """ "2 min 40 s" in seconds."""
    return sum(int(count) * UNITS[unit] for count, unit in re.findall(r"(\d+) (h|min|s)\b", text))


def promised(output: str) -> tuple[int, int]:
    """The epochs and the seconds that a recipe has printed."""
    found = re.search(r"length (\d+) epochs?.*?: about (.*?) on ", " ".join(output.split()))
    assert found, output
    return int(found[1]), seconds(found[2])


def trained(folder: Path, options: list[str], runs: Path) -> str:
    """Train on a folder, and say how long it took."""
    command = [sys.executable, "-m", "cait", "fit", "--data.root", str(folder.resolve()), *options]
    before, begun = os.getloadavg()[0], time.monotonic()
    run = subprocess.run(command, cwd=runs, capture_output=True, text=True, check=True)
    took, after = time.monotonic() - begun, os.getloadavg()[0]
    epochs, told = promised(run.stdout)
    off = 100 * (took / told - 1)
    load = f"load {before:.1f} before, {after:.1f} after"
    return f"{folder.name}, {epochs} epochs: about {duration(told)}, taken {took:.0f} s ({off:+.0f} %); {load}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="a file of Markdown to add to")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:cut])
    os.environ["PYTHONPATH"] = str(REPO / "src")
    with tempfile.TemporaryDirectory() as runs:
        for folder in given.folders:
            line = trained(folder, [f"--minutes={given.minutes:g}", *words[cut + 1 :]], Path(runs))
            print(line, flush=True)
            add(given.out, line)


if __name__ == "__main__":
    main()

"""Seconds and memory before the first step, on a folder of ImageNet's shape.

    python benchmarks/start.py [--classes 1000] [--images 1281000] [--workers 2] [--out FILE]
    python benchmarks/start.py --digits 5 [--against FOLDER] [--out FILE]

The folder is made of hard links to a few small JPEGs, below --folder. The start is a process of its own: the
imports, the data module's `setup`, the digest of the names that checkpoints hold, and the first batch of the loader's
workers. Memory is a process's own plus its share of what it has in common with the others (PSS). With the right to do
so the system's cache of files is dropped before it.

--digits times whole commands, so many times each: the digits until the first step, `cait zoo`, and a misspelt setting.
A second checkout takes turns with this one. The seconds are those of the clock, and those of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from report import REPO, add

LINKS = 60_000
"""Names of one file; file systems allow about 65,000."""

FIRST = """
import resource, time
from lightning.pytorch import Callback

class First(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1:
            used = resource.getrusage(resource.RUSAGE_SELF)
            print("first step", time.monotonic(), used.ru_utime + used.ru_stime)
"""
"""A callback in first.py that says when the first step is done, and what the process has used of the cores."""
COMMANDS = {
    "first step of the digits": "fit --config {}/configs/digits.yaml --trainer.accelerator cpu --trainer.max_steps 1 "
    "--trainer.limit_val_batches 0 --trainer.callbacks+=first.First",
    "cait zoo": "zoo",
    "a misspelt setting": "fit --config {}/configs/digits.yaml --model.lerning_rate 1",
}


def make(root: Path, classes: int, images: int, val: int = 2) -> None:
    import numpy as np
    from PIL import Image

    rng, made = np.random.default_rng(0), 0
    (root / "files").mkdir(parents=True)
    for split, each in (("train", images // classes), ("val", val)):
        for label in range(classes):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(each):
                source = root / "files" / f"{made // LINKS}.jpg"
                if made % LINKS == 0:
                    Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(source)
                os.link(source, folder / f"n{label:08d}_{number}.JPEG")
                made += 1


def megabytes(process: int | str) -> float:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1000


def children() -> list[str]:
    me = os.getpid()
    return Path(f"/proc/{me}/task/{me}/children").read_text().split()


def start(root: str, workers: int) -> None:
    """In a process of its own: print what each part took as JSON."""
    seconds, begin = {}, time.perf_counter()

    def done(part: str) -> None:
        nonlocal begin
        seconds[part], begin = time.perf_counter() - begin, time.perf_counter()

    import cait.cli.lightning  # noqa: F401  # what `cait fit` imports
    from cait import ImageNetDataModule

    done("imports")
    before = megabytes("self")
    data = ImageNetDataModule(root=root, num_workers=workers, img_size=32, batch_size=32)
    data.setup("fit")
    done("setup")
    data.state_dict()
    done("digest")
    batches = iter(data.train_dataloader())
    next(batches)
    done("first batch")
    memory = {"imports": before, "process": megabytes("self"), "workers": [megabytes(child) for child in children()]}
    print(json.dumps({"seconds": seconds, "memory": memory, "images": len(data.train_images)}))


def command(checkout: Path, words: str, folder: Path) -> tuple[float, float]:
    """Seconds that `cait` takes, from its start to its end or to the first step; and those of one core."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cait", *words.format(checkout).split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
    )
    seconds, used = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2):
        raise SystemExit(done.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("first step"):
            at, cores = map(float, line.split()[2:])
            return at - begin, cores
    return seconds, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def digits(rounds: int, against: Path | None, folder: Path, out: Path | None) -> None:
    """Time each of COMMANDS `rounds` times, in turns with another checkout."""
    (folder / "first.py").write_text(FIRST)
    checkouts = [REPO, *([against.resolve()] if against else [])]
    for what, words in COMMANDS.items():
        for checkout in checkouts:  # bytecode, the digits' files, the system's cache of files
            command(checkout, words, folder)
        found = [[command(checkout, words, folder) for checkout in checkouts] for _ in range(rounds)]
        medians = [[median(column) for column in zip(*times, strict=True)] for times in zip(*found, strict=True)]
        line = f"{what}, median of {rounds}: {medians[0][0]:.2f} s ({medians[0][1]:.2f} s of one core)"
        if against:
            shares = [median(one[0][kind] / one[1][kind] for one in found) for kind in (0, 1)]
            line += f"; before {medians[1][0]:.2f} s ({medians[1][1]:.2f} s), {shares[0]:.2f} ({shares[1]:.2f}) of it"
        print(line, flush=True)
        add(out, line)


def drop_caches() -> bool:
    with suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1_281_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to make the images; default a folder for a while")
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    parser.add_argument(
        "--digits", type=int, metavar="ROUNDS", help="time `cait fit` on the digits, and short commands"
    )
    parser.add_argument("--against", type=Path, help="another checkout to time beside this one")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(options.start, options.workers)
        return
    place = Path(tempfile.mkdtemp(prefix="start-", dir=options.folder))
    try:
        if options.digits:
            digits(options.digits, options.against, place, options.out)
            return
        make(place / "data", options.classes, options.images)
        cold = drop_caches()
        words = [sys.executable, __file__, "--start", str(place / "data"), "--workers", str(options.workers)]
        environment = os.environ | {"PYTHONPATH": str(REPO / "src")}
        output = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in found["seconds"].items())
        memory = found["memory"]
        workers = " + ".join(f"{size:,.0f}" for size in memory["workers"])
        line = (
            f"{found['images']:,} images in {options.classes:,} classes, "
            f"{'cold' if cold else 'warm'} disk: {sum(found['seconds'].values()):.1f} s ({parts}); "
            f"{memory['imports']:,.0f} MB after the imports, process and workers {memory['process']:,.0f} + "
            f"{workers} MB"
        )
        print(line, flush=True)
        add(options.out, line)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()

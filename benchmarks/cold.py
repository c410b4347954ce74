"""What `--data.read_ahead` gains where files are not in memory, and what it costs where they are.

    python benchmarks/cold.py [--files 640] [--threads 8] [--rounds 3] [--slow MS] [--out FILE]

The images are those of input.py, in a folder, in shards, and as raw pixels of at most 400 a side in shards. One process
makes training batches of 128, without and with threads, in turns. Before a cold turn all clean pages, inodes and paths
leave memory, which needs root. `--slow` also reads through a file system that answers each opening and each read so
many milliseconds late, as one in a network may; it needs root, /dev/fuse, libfuse 2 and the package fusepy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from input import prepare
from report import add

from cait.cli import main as cait_main
from cait.data.datamodule import ImageNetDataModule

BATCH = 128
DROP = Path("/proc/sys/vm/drop_caches")


def serve(folder: str, mount: str, seconds: float) -> None:
    """Show `folder` at `mount`, late."""
    from fusepy import FUSE, FuseOSError, Operations

    class Late(Operations):  # type: ignore[misc]
        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            try:
                found = os.stat(folder + path)
            except OSError as error:
                raise FuseOSError(error.errno) from error
            return {name: getattr(found, name) for name in ("st_mode", "st_size", "st_mtime", "st_nlink")}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(folder + path)]

        def open(self, path: str, flags: int) -> int:
            time.sleep(seconds)
            return os.open(folder + path, flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(seconds)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

    FUSE(Late(), mount, foreground=True, ro=True, kernel_cache=True)


@contextmanager
def mounted(folder: Path, milliseconds: float) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as mount:
        command = [sys.executable, __file__, "--serve", str(folder), mount, str(milliseconds / 1e3)]
        server = subprocess.Popen(command)
        try:
            while not os.path.ismount(mount):
                if server.poll() is not None:
                    raise SystemExit("no slow file system: it needs root, /dev/fuse, libfuse 2 and fusepy")
                time.sleep(0.1)
            yield Path(mount)
        finally:
            server.terminate()
            server.wait()


def seconds_an_image(images: Any, turn: int, files: int) -> float:
    order = torch.randperm(files, generator=torch.Generator().manual_seed(turn)).tolist()
    start = time.perf_counter()
    for first in range(0, files, BATCH):
        images.__getitems__([(turn, index, 0) for index in order[first : first + BATCH]])
    return (time.perf_counter() - start) / files


def measure(root: Path, files: int, threads: int, rounds: int, cold: bool) -> str:
    """Milliseconds an image without and with threads, medians, and the median of the rounds' ratios."""
    sides = {}
    for read_ahead in (0, threads):
        data = ImageNetDataModule(str(root), batch_size=BATCH, num_workers=0, repeats=1, read_ahead=read_ahead)
        data.announces = False
        data.setup("fit")
        sides[read_ahead] = data.train_images
        seconds_an_image(data.train_images, -1, BATCH)  # what is made once
    took: dict[int, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sorted(sides, reverse=bool(turn % 2)):
            if cold:
                os.sync()
                DROP.write_text("3")
            took[side].append(seconds_an_image(sides[side], turn, files))
    without, ahead = (1e3 * statistics.median(took[side]) for side in (0, threads))
    ratio = statistics.median(a / b for a, b in zip(took[0], took[threads], strict=True))
    return f"{without:.2f} ms an image, {ahead:.2f} with {threads} threads, {ratio:.2f}×"


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        folder, mount, seconds = sys.argv[2:]
        return serve(folder, mount, float(seconds))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=640)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=float, metavar="MS", help="milliseconds of a slow file system's answers")
    parser.add_argument("--out", type=Path, help="Markdown file to which lines are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder / "folder", given.files, given.files)
        for name, options in {"shards": [], "raw shards": ["--raw", "--max_side=400"]}.items():
            cait_main(["shards", str(folder / "folder"), str(folder / name), "--images=64", *options])

        def compare(where: Path, files: str, cold: bool, rounds: int = given.rounds) -> None:
            for name in ("folder", "shards", "raw shards"):
                found = measure(where / name, given.files, given.threads, rounds, cold)
                print(line := f"{name}, {files}, {rounds} rounds: {found}", flush=True)
                add(given.out, line)

        compare(folder, "in memory", cold=False)
        compare(folder, "cold", cold=True)
        if given.slow:
            with mounted(folder, given.slow) as mount:
                compare(mount, f"cold, each answer {given.slow:g} ms late", cold=True)


if __name__ == "__main__":
    main()

"""What several measurements share: where and when one was made, its files, and clocks."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path += [str(REPO), str(REPO / "tests/support")]  # for contrib, and for oracles of the tests
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def device() -> str:
    """The GPU, else the processor with its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True
        )
    except OSError:  # there is no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def stamp() -> str:
    """Date, device, versions and commit."""
    return f"{datetime.date.today()}, {device()}, torch {torch.__version__}, commit {commit()}"


def file_name(what: str, tag: str | None = None) -> str:
    """Of a measurement's files, without an ending: what was measured, on what device, and when."""
    words = "".join(letter if letter.isalnum() else "-" for letter in device().lower())
    return "-".join(
        word for word in (what, words, tag, str(datetime.date.today())) if word
    ).replace("--", "-")


def show(lines: Sequence[str], out: Path | None) -> None:
    """Print the lines of a Markdown file, and write it if one is named."""
    print("\n".join(lines))
    if out:
        out.write_text("\n".join(lines) + "\n")


def write(out: Path, name: str, record: dict[str, Any], lines: Iterable[str]) -> None:
    """A measurement's two files: what was found, under "stamp" where and when, as JSON; the lines as Markdown."""
    (out / f"{name}.json").write_text(json.dumps({"stamp": stamp(), **record}, indent=1) + "\n")
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")


def median_ms(call: Callable[[], Any], rounds: int) -> float:
    """Median of `rounds` calls after three, by the GPU's own clock where there is one."""
    times = []
    for turn in range(rounds + 3):
        if DEVICE == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - start)
        if turn >= 3:
            times.append(took)
    return statistics.median(times)


def processor_ms(call: Callable[[], Any]) -> float:
    """Milliseconds that this process takes of the processor, which other work on the machine hardly changes."""
    begin = time.process_time()
    call()
    return 1e3 * (time.process_time() - begin)


def in_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[Callable[[], Any]], float] = processor_ms,
    warm: int = 1,
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, after `warm` that make what is made once. Every other runs backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + warm):
        for name in list(calls) if turn % 2 else reversed(calls):
            times[name].append(clock(calls[name]))
    return {name: found[warm:] for name, found in times.items()}

"""Where and when a measurement was made."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parent.parent


def device() -> str:
    """The GPU, else the processor with its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def stamp() -> str:
    """Date, device, versions and commit."""
    return f"{datetime.date.today()}, {device()}, torch {torch.__version__}, commit {commit()}"


def file_name(what: str, tag: str | None = None) -> str:
    """Of a measurement's files, without an ending: what was measured, on what device, and when."""
    words = "".join(letter if letter.isalnum() else "-" for letter in device().lower())
    return "-".join(word for word in (what, words, tag, str(datetime.date.today())) if word).replace("--", "-")


def write(out: Path, name: str, record: dict[str, Any], lines: Iterable[str]) -> None:
    """A measurement's two files: what was found, under "stamp" where and when, as JSON; the lines as Markdown."""
    (out / f"{name}.json").write_text(json.dumps({"stamp": stamp(), **record}, indent=1) + "\n")
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")

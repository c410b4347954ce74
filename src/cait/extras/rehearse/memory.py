"""Memory that is left for a process, as Linux counts it."""

import math
import re
from pathlib import Path

from cait import disk

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


def left() -> float:
    """Bytes that this process may still take: of the machine, or of its control groups. Infinity if nothing says."""
    if not PROC.is_dir():
        return math.inf
    amounts = [1024 * number(PROC / "meminfo", "MemAvailable: +")]
    name = disk.read_text(PROC / "self/cgroup").rpartition("::")[2]
    folder = GROUPS / name.strip("/\n")
    for group in (folder, *folder.parents):
        if limit := number(group / "memory.max"):
            cache = number(group / "memory.stat", "inactive_file ")
            amounts.append(limit - number(group / "memory.current") + cache)
    return min(amounts)


def number(path: Path, name: str = "") -> int:
    """A number in a file of the kernel; 0 if it is not there."""
    text = disk.read_text(path) if path.exists() else ""
    line = re.search(f"^{name}([0-9]+)", text, re.M)
    return int(line[1]) if line else 0

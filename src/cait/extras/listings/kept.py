"""A long listing of images in a file below ~/.cache/cait. It is used as long as no folder has changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cait import disk
from cait.data import listing
from cait.data.listing import Files, Times, walk

KEPT_FROM = 10_000
"""Shorter listings take no time, and are not kept."""
SETTLED = 2_000_000_000
"""Nanoseconds that a folder must have been left alone: a change right after it was listed may not change its time."""


def list_images(folder: Path, names: Sequence[str], pool: Executor) -> Files:
    """The kept listing, or a new one, which is kept if it is long."""
    kept = _kept(folder, names)
    found = _read(kept, folder, names, pool)
    if found is None:
        start = time.time_ns()
        found, times = walk(folder, names, pool)
        changed = {when for _, when in times}
        # File systems that show buckets as folders may give all of them the same time.
        # A folder that is missing behind a link may come back without a trace.
        is_whole = len(found) >= KEPT_FROM and listing.BROKEN not in found.left_out
        if is_whole and len(changed) > 1 and max(changed) < start - SETTLED:
            _keep(kept, found, times)
    return found


def _kept(folder: Path, names: Sequence[str]) -> Path:
    key = "\0".join([str(folder.absolute()), *listing.EXTENSIONS, "", *names])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cait/listings" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.npz"


def _keep(kept: Path, files: Files, times: Times) -> None:
    arrays: dict[str, Any] = {"paths": np.frombuffer(files.paths, np.uint8), "ends": files.ends, "labels": files.labels}
    folders = np.frombuffer(b"\0".join(os.fsencode(inner) for inner, _ in times), np.uint8)
    with suppress(OSError):  # the home may be full or read-only
        kept.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(kept) as beside, beside.open("wb") as file:
            changed, left_out = [when for _, when in times], json.dumps(files.left_out)
            np.savez(file, folders=folders, changed=changed, left_out=left_out, **arrays)


def _read(kept: Path, folder: Path, names: Sequence[str], pool: Executor) -> Files | None:
    """The kept listing, None if there is none or a folder has changed since."""
    try:
        with np.load(kept) as found:
            content = dict(found)
        folders = [os.path.join(folder, os.fsdecode(inner)) for inner in content.pop("folders").tobytes().split(b"\0")]
        changed = content.pop("changed")
        now = list(pool.map(os.stat, folders, chunksize=64))
        if not np.array_equal(changed, [status.st_mtime_ns for status in now]):
            return None
        files, start = Files((), str(folder)), len(os.path.join(folder, ""))
        for inner, status in zip(folders, now, strict=True):
            label = names.index(inner[start:].split(os.sep)[0])
            files.folders[status.st_dev, status.st_ino] = label, inner
        files.left_out.update(json.loads(str(content["left_out"])))
        files.paths = content["paths"].tobytes()
        files.ends, files.labels = array("q", content["ends"].tobytes()), array("q", content["labels"].tobytes())
        return files
    except Exception:  # a torn file raises many kinds; the listing is made anew
        return None

"""Before the first step all processes compare what they start from: the checkpoint, and the lists of images."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.errors import UserError, printable
from cait.run.program import Processes

BLOCK = 1024
"""Names of images whose digest is compared at once, to find the first that differs."""


class SameStart(Callback):
    """Ends all processes in one line if one of them, perhaps on another machine, sees other data or another checkpoint.

    It is no state of a run: without it such a run would train on other images than it says, or wait for ever for the
    process that has fewer batches.
    """

    def __init__(self, data: Any, processes: Processes) -> None:
        self.data, self.processes = data, processes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called after the data module has listed its images."""
        if stage == "fit":
            check(self.processes, trainer.global_rank, self.data)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called on every process or on none, because process 0 has chosen the checkpoint."""
        own = [socket.gethostname(), f"{Path(trainer.ckpt_path or '').name} at step {int(checkpoint['global_step']):,}"]
        words = [json.loads(word) for word in self.processes.agree(json.dumps(own))]
        for other, (host, start) in enumerate(words):
            if start != words[0][1]:
                here = f"process {other} on {host} starts from {start}, process 0 on {words[0][0]} from {words[0][1]}"
                raise UserError(f"{here}; all nodes must share the folder of the run")


def check(processes: Processes, rank: int, data: Any) -> None:
    """Call it on all processes. Raises UserError on each if they do not see the same images."""
    lists = {"training": Names(data.source.train, data.root), "validation": Names(data.source.val, data.root)}
    own: dict[str, Any] = {kind: [len(names), names.digest()] for kind, names in lists.items()}
    own |= {"host": socket.gethostname(), "classes": _digest(data.class_names)}
    all_of_them = [json.loads(word) for word in processes.agree(json.dumps(own))]
    kinds = ("classes", *lists)
    found = [
        (other, kind) for other, seen in enumerate(all_of_them) for kind in kinds if seen[kind] != all_of_them[0][kind]
    ]
    if not found:
        return
    other, kind = found[0]
    first, seen = all_of_them[0], all_of_them[other]
    here, there = f"process {other} on {seen['host']}", f"process 0 on {first['host']}"
    if kind == "classes":
        raise UserError(f"{here} sees other classes in {data.root} than {there}; all nodes must have the same data")
    concerned = rank in (0, other)
    blocks = [json.loads(word) for word in processes.agree(json.dumps(lists[kind].blocks if concerned else []))]
    place = first_difference(blocks[0], blocks[other])
    words = processes.agree(json.dumps(lists[kind].block(place) if concerned else []))
    what = printable(
        difference(json.loads(words[0]), json.loads(words[other]), place * BLOCK, seen["host"], first["host"])
    )
    counts = f"{seen[kind][0]:,} {kind} images in {data.root}, {there} {first[kind][0]:,}"
    raise UserError(f"{here} sees {counts}: {what}; all nodes must have the same data")


class Names:
    """The names of images below `root`, and a digest of each block of them."""

    def __init__(self, samples: Any, root: Any) -> None:
        self.samples, self.start = samples, len(str(root)) + 1
        self.blocks = [_digest(self.block(place)) for place in range(-(-len(samples) // BLOCK))]

    def __len__(self) -> int:
        return len(self.samples)

    def block(self, place: int) -> list[str]:
        numbers = range(place * BLOCK, min((place + 1) * BLOCK, len(self.samples)))
        return [self.samples.name(number)[self.start :] for number in numbers]

    def digest(self) -> str:
        return _digest(self.blocks)


def first_difference(first: list[str], other: list[str]) -> int:
    pairs = zip(first, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))


def difference(first: list[str], other: list[str], start: int, host: str, first_host: str) -> str:
    """The first name that differs between process 0 and another, in words."""
    place = first_difference(first, other)
    expected, found = [*first[place:], None][0], [*other[place:], None][0]
    if expected is not None and (found is None or found in first[place:]):
        return f"{expected} is not there on {host}"
    if found is not None and (expected is None or expected in other[place:]):
        return f"{found} is not there on {first_host}"
    return f"image {start + place + 1:,} is {found} on {host}, {expected} on {first_host}"


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]

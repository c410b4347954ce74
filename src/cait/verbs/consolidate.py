"""`cait consolidate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cait import run
from cait.errors import UserError
from cait.verbs.options import Options, named_run


def consolidate(arguments: list[str], module: Any, data: Any) -> None:
    """Write the checkpoint of a sharded run as one file."""
    options = Options("consolidate", "Write a checkpoint of a run with fsdp2 as one file, like that of a run with ddp.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default best")
    options.add_argument("--output", type=Path, metavar="FILE", help="default consolidated/ in the run's folder")
    given = options.parse_args(arguments)
    folder = named_run("consolidate", given.run)
    path = folder / run.CHECKPOINTS / (run.BEST if given.checkpoint == "best" else run.LAST)
    if not path.exists():
        raise UserError(f"{folder} has no {path.name} yet")
    if path.is_file():
        raise UserError(f"{path} is one file already")
    output = given.output or folder / run.CONSOLIDATED / path.name
    from cait.callbacks.checkpoints import DurableCheckpointIO, is_whole

    if not is_whole(path):
        raise UserError(f"{path} is damaged")
    writer = DurableCheckpointIO()
    writer.save_checkpoint(run.read_checkpoint(path), output)
    if writer.error:
        raise UserError(writer.error)
    print(os.path.relpath(output))

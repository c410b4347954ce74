"""`cait consolidate`."""

from __future__ import annotations

import os
from pathlib import Path

from cait import ckpt, disk
from cait.cli.options import Options, named_run
from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program


def consolidate(arguments: list[str], program: Program) -> None:
    """Write the checkpoint of a sharded run as one file."""
    options = Options("consolidate", "Write a checkpoint of a run with fsdp2 as one file, like that of a run with ddp.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    options.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default best")
    options.add_argument("--output", type=Path, metavar="FILE", help="default consolidated/ in the run's folder")
    given = options.parse_args(arguments)
    folder = named_run("consolidate", given.run)
    path = folder / rundir.CHECKPOINTS / (rundir.BEST if given.checkpoint == "best" else rundir.LAST)
    if not path.exists():
        raise UserError(f"{folder} has no {path.name} yet")
    if path.is_file():
        raise UserError(f"{path} is one file already")
    output = given.output or folder / "consolidated" / path.name
    disk.check_output(output)
    from cait.run.checkpoints import DurableCheckpointIO, is_whole

    if not is_whole(path):
        raise UserError(f"{path} is damaged")
    writer = DurableCheckpointIO()
    writer.save_checkpoint(ckpt.read_checkpoint(path), output)
    if writer.error:
        raise UserError(writer.error)
    print(os.path.relpath(output))

"""`cait export`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from cait import ckpt
from cait.cli.loading import build_module
from cait.cli.options import Options, named_run
from cait.cli.saved import data_settings
from cait.errors import UserError
from cait.run import rundir
from cait.run.program import Program

NEEDED = ("mean", "std", "crop_pct", "interpolation")
TOLD = ("exif_orientation", "background", "shrink")
"""Settings that timm's configuration holds, and others that are written too."""


def export(arguments: list[str], program: Program) -> None:
    """Write the network of a run's best checkpoint in another program's format."""
    from cait.model import formats

    options = Options("export", "Write the best network of a run for other programs.")
    options.add_argument("run", metavar="NAME", nargs="?", help="the run's folder in logs/")
    default_format = "timm" if "timm" in formats.names() else "torch_export"
    options.add_argument("--format", choices=formats.names(), default=default_format, help=f"default {default_format}")
    options.add_argument("--ema", action="store_true", help="the moving average instead of the raw weights")
    options.add_argument("--output", type=Path, metavar="PATH", help="file to write; for timm a directory")
    options.add_trust()
    given = options.parse_args(arguments)
    folder = named_run("export", given.run)
    checkpoint = rundir.best_checkpoint(folder, "export")
    preprocessing = _preprocessing(folder, needed=given.format == "timm")
    from cait.guards import trust
    from cait.model.network import input_shape

    with contextlib.nullcontext() if given.trusted else trust.only_own(folder):
        content = ckpt.read_checkpoint(checkpoint, without=["optimizer_states"])
        built = build_module(checkpoint, content, given.ema, program.module)
    shape, names = input_shape(built.hparams), built.class_names
    default = Path("ema" if given.ema else "") / formats.format_named(given.format).file
    output = given.output or folder / "export" / default
    exported = formats.export(built.model, output, given.format, preprocessing, shape, names)
    for file in exported.files:
        print(os.path.relpath(file))
    print(f"read back, the logits differ by {exported.difference:.1e} at most")


def _preprocessing(folder: Path, needed: bool) -> dict[str, Any]:
    """How images are prepared, as far as the run says. Raises UserError if `needed` settings are missing."""
    if not (needed or (folder / rundir.CONFIG).is_file()):
        return {}
    data = data_settings(folder)
    for name in NEEDED:
        if needed and name not in data:
            raise UserError(f"{rundir.config(folder)} does not say how images are prepared: {name!r} is missing")
    return {name: data[name] for name in (*NEEDED, *TOLD) if name in data}

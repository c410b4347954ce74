"""`cait export`."""

from __future__ import annotations

import os
from pathlib import Path

from cait.cli.loading import checkpoint_of, from_checkpoint
from cait.cli.options import Options, run_missing
from cait.extras.formats import exporting
from cait.guards import trust
from cait.model.network import input_shape
from cait.run.program import Program
from cait.settings import values


def export(arguments: list[str], program: Program) -> None:
    """Write the network of a run's best checkpoint in another program's format."""
    options = Options("export", "Write the best network of a run for other programs.")
    options.add_argument("run", metavar="RUN", nargs="?", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument("--format", choices=exporting.FORMATS, default="timm", help="default timm")
    options.add_weights()
    options.add_argument("--output", type=Path, metavar="PATH", help="file to write; for timm a directory")
    options.add_trust()
    given = options.parse_args(arguments)
    if given.run is None:
        raise run_missing("export")
    checkpoint, folder = checkpoint_of(given.run, "export")
    with trust.only_own(given.trusted):
        loaded = from_checkpoint(checkpoint, folder, given.ema, module=program.module, data=program.data)
    shape, names = input_shape(loaded.module.hparams), loaded.module.class_names
    place = Path(folder or checkpoint.parent, "export", {None: "", True: "ema", False: "raw"}[given.ema])
    output = given.output or place / exporting.FORMATS[given.format].file
    preprocessing = values(loaded.data.preprocessing)
    metadata = preprocessing | loaded.task.metadata
    files, difference = exporting.export(loaded.network, output, given.format, metadata, shape, names)
    for file in files:
        print(os.path.relpath(file))
    print(f"read back, the logits differ by {difference:.1e} at most")

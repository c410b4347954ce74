"""`cait shards`."""

from __future__ import annotations

from pathlib import Path

from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program

WHAT = """\
Pack the images of a data set into chunks of LitData's format, to train from a folder or from S3. The bytes of the
files are kept as they are. Killed, the same command goes on, and the files are the same."""
NAMES = {"train_split": "train", "val_split": "val", "data_dir": None, "input_key": "image", "target_key": "label"}
"""Options that are settings of the data module, like `val_fraction` and `download`, and their defaults."""


def shards(arguments: list[str], program: Program) -> None:
    """Make shards of a data set."""
    asked = _options().parse_args(arguments)
    if asked.images < 1 or (asked.workers is not None and asked.workers < 0):
        raise UserError("--images must be at least 1 and --workers at least 0")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from cait import cores
    from cait.data import source
    from cait.extras.root_name import root_name
    from cait.extras.shards import writer

    settings = {name: getattr(asked, name) for name in (*NAMES, "val_fraction", "download")}
    opened = (
        program.data(root=asked.root, **settings).source if program.data else source.open_source(asked.root, **settings)
    )
    opened.prepare()
    splits = {"train": asked.train_split, "val": asked.val_split}
    workers = cores.share(1) if asked.workers is None else asked.workers
    with Progress("images", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=len(opened.train) + len(opened.val))
        for images in writer.make(opened, root_name(asked.root), splits, asked.out, asked.images, workers):
            bar.advance(task, images)
    size = sum(path.stat().st_size for path in asked.out.rglob("*") if path.is_file()) / 1e6
    print(f"{len(opened.train):,} training and {len(opened.val):,} validation images, {size:,.1f} MB: {asked.out}")


def _options() -> Options:
    options = Options("shards", WHAT)
    options.add_argument("root", metavar="DIR", help="any data set that --data.root takes")
    options.add_argument("out", metavar="OUT", type=Path, help="folder for the shards")
    options.add_argument("--images", type=int, default=512, metavar="N", help="images in a chunk; default 512")
    options.add_argument("--workers", type=int, metavar="N", help="processes; default one for each core")
    for name, default in NAMES.items():
        options.add_argument(f"--{name}", default=default, metavar="NAME", help=f"as --data.{name}")
    options.add_argument("--val_fraction", type=float, default=0.1, metavar="SHARE", help="as --data.val_fraction")
    options.add_argument("--download", action="store_true", help="as --data.download true")
    return options

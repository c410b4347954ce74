"""`cait shards`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program

WHAT = """\
Pack the images of a data set into chunks of LitData's format, to train from a folder or from S3. The bytes of the
files are kept as they are. Killed, the same command goes on, and the files are the same."""
SOURCE = ("train_split", "val_split", "val_fraction", "data_dir", "download", "input_key", "target_key")
"""Options that are settings of the data module."""


def shards(arguments: list[str], program: Program) -> None:
    """Make shards of a data set."""
    asked = _options().parse_args(arguments)
    if asked.images < 1 or (asked.workers is not None and asked.workers < 0):
        raise UserError("--images must be at least 1 and --workers at least 0")
    try:
        import_module("litdata")
    except ImportError as error:
        raise UserError("shards are written by LitData: .venv/bin/pip install --editable '.[stream]'") from error
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from cait import cores
    from cait.data import folder, source
    from cait.extras.shards import writer

    settings = {name: getattr(asked, name) for name in SOURCE}
    opened = (
        program.data(root=asked.root, **settings).source if program.data else source.open_source(asked.root, **settings)
    )
    opened.prepare()
    count = len(opened.train) + len(opened.val)
    splits = {"train": asked.train_split, "val": asked.val_split}
    workers = cores.share(1) if asked.workers is None else asked.workers
    root = folder.root_name(asked.root)
    with Progress("images", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=count)
        for images in writer.make(opened, root, splits, asked.out, asked.images, workers):
            bar.advance(task, images)
    print(f"{len(opened.train):,} training and {len(opened.val):,} validation images, {_size(asked.out)}: {asked.out}")


def _options() -> Options:
    options = Options("shards", WHAT)
    options.add_argument("root", metavar="DIR", help="any data set that --data.root takes")
    options.add_argument("out", metavar="OUT", type=Path, help="folder for the shards")
    options.add_argument("--images", type=int, default=512, metavar="N", help="images in a chunk; default 512")
    options.add_argument("--workers", type=int, metavar="N", help="processes; default one for each core")
    options.add_argument("--train_split", default="train", metavar="NAME", help="as --data.train_split")
    options.add_argument("--val_split", default="val", metavar="NAME", help="as --data.val_split")
    options.add_argument("--val_fraction", type=float, default=0.1, metavar="SHARE", help="as --data.val_fraction")
    options.add_argument("--data_dir", metavar="DIR", help="as --data.data_dir")
    options.add_argument("--download", action="store_true", help="as --data.download true")
    options.add_argument("--input_key", default="image", metavar="NAME", help="as --data.input_key")
    options.add_argument("--target_key", default="label", metavar="NAME", help="as --data.target_key")
    return options


def _size(out: Path) -> str:
    return f"{sum(path.stat().st_size for path in out.rglob('*') if path.is_file()) / 1e6:,.1f} MB"

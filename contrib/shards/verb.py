"""`cait shards`."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program
from cait.settings import Settings, names_in

WHAT = """\
Pack the images of a data set into chunks of LitData's format, to train from a folder or from S3. The bytes of the
files are kept as they are, unless --max_side or --raw changes the training images. Killed, the same command goes on,
and the files are the same."""
NAMED = {"train": "training", "val": "validation", "test": "test"}
NAMES = {
    "train_split": "train",
    "val_split": "val",
    "val_list": None,
    "labels": None,
    "group_by": None,
    "data_dir": None,
    "input_key": "image",
    "target_key": "label",
}
"""Options that are settings of the data module, like `val_fraction` and `download`, and their defaults."""


def shards(arguments: list[str], program: Program) -> None:
    asked = _options().parse_args(arguments)
    if asked.images < 1 or (asked.workers is not None and asked.workers < 0):
        raise UserError("--images must be at least 1 and --workers at least 0")
    pixels = _pixels(asked)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from cait import cores, plugins
    from cait.data import source
    from cait.extras.display import root_name
    from contrib.shards import writer

    root = asked.root
    settings = {name: getattr(asked, name) for name in (*NAMES, "val_fraction", "download")}
    opened = (
        program.data(root=root, **settings).source
        if program.data
        else source.open_source(root, **settings)
    )
    opened.prepare()
    _check_used(opened, root, settings)
    sets = {"train": opened.train, "val": opened.val}
    if "evaluation" in plugins.extras():  # which scores it
        from cait.extras.evaluation.extra_sets import open_test

        if test := open_test(opened):
            sets["test"] = test.samples
    if pixels:
        pixels.check_set(opened.train)
    with Progress("images", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=sum(map(len, sets.values())))
        for images in writer.make(
            opened,
            sets,
            root_name(root),
            {"train": asked.train_split, "val": asked.val_split, "test": "test"},
            asked.out,
            asked.images,
            cores.share(1) if asked.workers is None else asked.workers,
            pixels,
        ):
            bar.advance(task, images)
    size = sum(path.stat().st_size for path in asked.out.rglob("*") if path.is_file()) / 1e6
    counts = [f"{len(sets[split]):,} {NAMED[split]}" for split in sets]
    print(f"{', '.join(counts[:-1])} and {counts[-1]} images, {size:,.1f} MB: {asked.out}")


def _check_used(source: Any, root: str, settings: Settings) -> None:
    """Raise UserError if the data set has no use for an option, or an image may have several classes."""
    from cait import plugins
    from cait.data.datamodule import DataSettings
    from cait.data.folder import FolderSource

    useless = {
        *getattr(source, "without_use", FolderSource.divided_by),
        *plugins.without_use(root, settings),
        *(settings.keys() - {*names_in(DataSettings)}),
    }
    for name in sorted(useless & settings.keys()):
        if settings[name] not in (NAMES.get(name), 0.1, False):
            raise UserError(f"--{name} {settings[name]} does nothing for {root}: leave it out")
    if getattr(source, "label_sets", None) is not None:
        raise UserError(f"the images of {root} may have several classes, shards hold one for each")


def _pixels(asked: Namespace) -> Any:
    """What the options say of the training images, a `Pixels`; None leaves them. Raises UserError."""
    from contrib.shards.pixels import Pixels

    if asked.quality is not None and (asked.raw or asked.max_side is None):
        raise UserError("--quality is for --max_side without --raw")
    if not asked.raw and (asked.exif_orientation or asked.background):
        raise UserError(
            "--exif_orientation and --background are for --raw: image files keep theirs for a run to read"
        )
    if not asked.raw and asked.max_side is None:
        return None
    return Pixels(
        asked.max_side,
        95 if asked.quality is None else asked.quality,
        asked.raw,
        asked.exif_orientation != "false",
        None if asked.background == "null" else asked.background or "white",
    )


def _options() -> Options:
    options = Options("shards", WHAT)
    options.add_argument("root", metavar="DIR", help="any data set that --data.root takes")
    options.add_argument("out", metavar="OUT", type=Path, help="folder for the shards")
    options.add_argument(
        "--images", type=int, default=512, metavar="N", help="images in a chunk; default 512"
    )
    options.add_argument(
        "--workers", type=int, metavar="N", help="processes; default one for each core"
    )
    options.add_argument(
        "--max_side", type=int, metavar="N", help="make larger training images so many pixels long"
    )
    options.add_argument(
        "--quality", type=int, metavar="Q", help="JPEG quality of those; default 95"
    )
    options.add_argument(
        "--raw", action="store_true", help="store the pixels of training images, not image files"
    )
    options.add_argument(
        "--exif_orientation",
        choices=("true", "false"),
        help="of raw pixels, as --data.exif_orientation",
    )
    options.add_argument(
        "--background", metavar="COLOR", help="of raw pixels, as --data.background; or null"
    )
    for name, default in NAMES.items():
        options.add_argument(f"--{name}", default=default, metavar="NAME", help=f"as --data.{name}")
    options.add_argument(
        "--val_fraction", type=float, default=0.1, metavar="SHARE", help="as --data.val_fraction"
    )
    options.add_argument("--download", action="store_true", help="as --data.download true")
    return options

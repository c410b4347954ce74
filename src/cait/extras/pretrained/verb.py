"""`cait features`: what a network's head sees of images, in a file."""

import os
import sys
from pathlib import Path

from cait import disk
from cait.cli import loading
from cait.cli.options import Options
from cait.data.folder import FolderSource, Splits, class_folders, not_listed, scan_flat
from cait.data.table import Images
from cait.errors import UserError, printable, tell
from cait.extras import networks
from cait.run.program import Program


def features(arguments: list[str], program: Program) -> None:
    """Write the features of images, unpickled. Those that cannot be read are named on the screen and left out."""
    options = Options(
        "features", "Write what the head of a network sees of images: [N, d] in float32."
    )
    networks.add_options(options)
    options.add_argument(
        "--images",
        metavar="DIR",
        type=Path,
        required=True,
        help="class folders, train and val, or any folder",
    )
    options.add_argument(
        "--output", metavar="FILE", type=Path, required=True, help="file to write, .npz"
    )
    args = options.parse_args(arguments)
    disk.check_output(args.output, is_new=True)
    checkpoint, folder = networks.chosen(args, "take features of")
    files, class_names = listed(args.images)
    import numpy as np

    from cait.extras.features import extract

    loaded = networks.load(args, checkpoint, folder, program)
    extracted = extract(loaded.network, files, loaded.data, loading.device())
    names = [printable(os.path.relpath(path, args.images)) for path, _ in files]
    for index in sorted({*range(len(files))}.difference(extracted.kept.tolist())):
        print(f"left out, because it cannot be read: {names[index]}", file=sys.stderr)
    if not len(extracted.kept):
        raise UserError(f"none of the {len(files):,} images can be read")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with disk.atomic_write(args.output) as beside, beside.open("wb") as file:
        np.savez(
            file,
            names=np.array([names[index] for index in extracted.kept]),
            # an empty list would be of numbers
            class_names=np.array([*map(printable, class_names)], np.str_),
            features=extracted.features,
            labels=extracted.labels,
        )
    count, width = extracted.features.shape
    print(f"{count:,} × {width:,} features of {loaded.name}: {loaded.about}\n{args.output}")


def listed(root: Path) -> tuple[Images, list[str]]:
    """The images of a folder, those to train on first, and its classes; without classes the labels are -1."""
    source = FolderSource(Splits(root=str(root)))
    if not root.is_dir() or len(class_folders(source.split_folders()[0])) < 2:
        return scan_flat(root), []
    images = source.images
    if images.left_out:
        tell(f"{root}{not_listed(images.left_out)}")
    return images, source.class_names

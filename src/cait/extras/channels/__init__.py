"""Images of any number of channels: .npy, TIFF, DICOM, PNG of 16 bits."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from cait.data.listing import ARRAYS, EXTENSIONS, HIDDEN

CHANNELS, READER = "model.fields.in_chans", f"{__name__}.planes:read"
GROUPS = {"data": "cait.extras.channels.preprocessing:Planes"}
LOOKED_AT = 5
"""Files that Pillow tries to open before a folder counts as one of planes, because a single one may be damaged."""


def reading(**settings: Any) -> Any:
    """How images are read, by the settings of `PlanesReading`."""
    from cait.extras.channels.preprocessing import PlanesReading

    return PlanesReading(**settings)


def add_settings(line: Any, program: Any) -> None:
    """Where images are planes, add the settings that they need to those of `cait fit`."""
    if line.verb == "fit" and program.data is None:  # a data module of one's own may have transforms of its own
        from cait.cli.options import Options

        own = Options("fit")
        own.add_argument("--from", default="")
        source = vars(own.parse_known_args(line.words)[0])["from"]
        line.steps.append(lambda given: settings_for(line.typed, given, source))


def settings_for(typed: set[str], given: dict[str, Any], source: str = "") -> dict[str, Any]:
    """The settings to add to those `given`, if these or the images say that they are planes; what is `typed` stays.

    If weights come from the run `source`, planes are read and normalized as there. Raises UserError if no training
    image can be read.
    """
    root, is_asked = given.get("data.root"), given.get("data.reader") or given.get(CHANNELS) not in (None, 1, 3)
    unchanged = {"data.auto_augment": None, "data.color_jitter": None}
    if root and source and "data.reader" not in given and (of_run := read_as_in(source)):
        return {name: value for name, value in (of_run | unchanged).items() if name not in typed}
    if not root or "ckpt_path" in given or not (is_asked or ("data.reader" not in given and holds_planes(Path(root)))):
        return {}
    from cait.data.source import open_source
    from cait.extras.channels.planes import measure
    from cait.extras.channels.preprocessing import PlanesReading
    from cait.settings import group, nested

    reader = given.get("data.reader") or READER
    data: Any = nested(given)["data"] | {"reader": reader, "in_chans": given.get(CHANNELS) or 0}
    mean, std = measure(open_source(root, **data).train, group(PlanesReading, data))
    added = {"data.reader": reader, CHANNELS: len(mean)} | unchanged
    if len(data.get("mean") or ()) != len(mean):
        added |= {"data.mean": mean, "data.std": std}
    return {name: value for name, value in added.items() if name not in typed}


def read_as_in(source: str) -> dict[str, Any]:
    """The settings by which a run reads planes; empty if it reads none, or there is no such run."""
    from cait.cli import saved
    from cait.cli.loading import checkpoint_of
    from cait.errors import UserError

    with suppress(UserError):  # which the extra that starts from weights says
        folder = checkpoint_of(source, "start from")[1]
        data = saved.data_settings(folder) if folder else {}
        if data.get("reader"):
            held = {f"data.{name}": data.get(name) for name in ("reader", "reader_args", "mean", "std")}
            return held | {CHANNELS: len(data["mean"])}
    return {}


def holds_planes(folder: Path) -> bool:
    """Whether a folder holds arrays and no images, or TIFF files that Pillow does not know."""
    from PIL import UnidentifiedImageError

    from cait.data.reading import open_image

    images, unknown = [*islice(_files(folder, EXTENSIONS), LOOKED_AT)], 0
    for image in images:
        try:
            with open_image(image):
                return False
        except Exception as error:  # a damaged file says nothing
            unknown += isinstance(error, UnidentifiedImageError) and image.suffix.lower().startswith(".tif")
    return unknown > 0 if images else any(_files(folder, ARRAYS))


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        yield from (Path(place, name) for name in sorted(files) if name.lower().endswith(suffixes))

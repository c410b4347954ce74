"""Images of any number of channels: .npy, TIFF, DICOM, PNG of 16 bits."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

CHANNELS = "model.fields.in_chans"


def add_settings(line: Any, program: Any) -> None:
    """Where images are planes, add the settings that they need to those of `cait fit`."""
    if line.verb == "fit" and program.data is None:  # a data module of one's own may have transforms of its own
        line.steps.append(partial(settings_for, line.typed))


def settings_for(typed: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """The settings to add to those `given`, if these or the images say that they are planes; what is `typed` stays.

    Raises UserError if no training image can be read.
    """
    root, is_asked = given.get("data.root"), given.get("data.reader") or given.get(CHANNELS) not in (None, 1, 3)
    if not root or "ckpt_path" in given or not (is_asked or ("data.reader" not in given and holds_planes(Path(root)))):
        return {}
    from cait.data.reading import Reading
    from cait.data.source import open_source
    from cait.extras.channels.planes import measure
    from cait.settings import group, nested

    reader = given.get("data.reader") or f"{__name__}.planes:read"
    data: Any = nested(given)["data"] | {"reader": reader, "in_chans": given.get(CHANNELS) or 0}
    mean, std = measure(open_source(root, **data).train, group(Reading, data))
    added = {"data.reader": reader, CHANNELS: len(mean), "data.auto_augment": None, "data.color_jitter": None}
    if len(data.get("mean") or ()) != len(mean):
        added |= {"data.mean": mean, "data.std": std}
    return {name: value for name, value in added.items() if name not in typed}


def holds_planes(folder: Path) -> bool:
    """Whether a folder holds arrays and no images, or TIFF files that Pillow does not know."""
    from PIL import UnidentifiedImageError

    from cait.data.listing import ARRAYS, EXTENSIONS
    from cait.data.reading import open_image

    image = next(_files(folder, EXTENSIONS), None)
    if image is None:
        return any(_files(folder, ARRAYS))
    try:
        with open_image(image):
            return False
    except Exception as error:  # a damaged file says nothing
        return isinstance(error, UnidentifiedImageError) and image.suffix.lower().startswith(".tif")


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    from cait.data.listing import HIDDEN

    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        yield from (Path(place, name) for name in sorted(files) if name.lower().endswith(suffixes))

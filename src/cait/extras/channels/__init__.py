"""Images of any number of channels: .npy, TIFF, DICOM, PNG of 16 bits."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from cait.data.listing import ARRAYS, EXTENSIONS, HIDDEN
from cait.settings import Settings

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
    # a data module of one's own may have transforms of its own
    makes_own = program.data_overrides("make_train_transform", "make_eval_transform")
    if line.verb == "fit" and not makes_own:
        from cait.cli.options import Options

        own = Options("fit")
        own.add_argument("--from", dest="source", default="")
        source = own.parse_known_args(line.words)[0].source
        line.steps.append(lambda given: settings_for(line.typed, given, source))


def settings_for(typed: set[str], given: Settings, source: str = "") -> Settings:
    """The settings to add to those `given`, if these or the images say that they are planes; what is `typed` stays.

    If weights come from the run `source`, planes are read and normalized as there. Raises UserError if no training
    image can be read.
    """
    root = given.get("data.root")
    is_asked = given.get("data.reader") or given.get(CHANNELS) not in (None, 1, 3)
    unchanged = {"data.auto_augment": None, "data.color_jitter": None}
    if not root:
        return {}
    if source and "data.reader" not in given and (run_settings := read_as_in(source)):
        return {
            name: value for name, value in (run_settings | unchanged).items() if name not in typed
        }
    if "ckpt_path" in given or not (
        is_asked or ("data.reader" not in given and holds_planes(Path(root)))
    ):
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


def read_as_in(source: str) -> Settings:
    """The settings by which a run reads planes; empty if it reads none, or there is no such run."""
    from cait.cli import saved
    from cait.cli.loading import checkpoint_of
    from cait.errors import UserError

    with suppress(UserError):  # which the extra that starts from weights says
        _, folder = checkpoint_of(source, "start from")
        data = saved.data_settings(folder) if folder else {}
        if data.get("reader"):
            settings = {
                f"data.{name}": data.get(name) for name in ("reader", "reader_args", "mean", "std")
            }
            return settings | {CHANNELS: len(data["mean"])}
    return {}


def holds_planes(folder: Path) -> bool:
    """Whether a folder holds arrays and no images, or TIFF files that Pillow does not know."""
    from PIL import UnidentifiedImageError

    from cait.data.reading import open_image

    images = list(islice(_files(folder, EXTENSIONS), LOOKED_AT))
    if not images:
        return any(_files(folder, ARRAYS))
    is_unknown = False
    for image in images:
        try:
            with open_image(image):
                return False
        except UnidentifiedImageError:
            is_unknown |= image.suffix.lower().startswith(".tif")
        except Exception:  # a damaged file says nothing
            pass
    return is_unknown


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for inner, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        yield from (Path(inner, name) for name in sorted(files) if name.lower().endswith(suffixes))

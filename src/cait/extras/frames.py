"""Frames of a scene: images that validate beside nearly the same ones that are trained on."""

from bisect import bisect
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from cait.data.folder import FolderSource
from cait.data.reading import AS_SEEN, Reading, load_image, open_image
from cait.extras.features import evenly

LOOKED_AT = 50
SIDE = 32
"""Validation images whose neighbors are looked at, and the side in pixels at which two are compared."""
SAME = 4.0
OF_CONTRAST = 0.25
"""Alike are two that differ by fewer gray levels, and by less than this part of what one differs from its mean."""


def told_of_frames(source: FolderSource) -> str | None:
    """A line if many held-out images look like the image before or after them, to which scores are then too good."""
    if not source.holds_out or source.images.groups is not None:
        return None
    names = sorted(source.train.name(index) for index in range(len(source.train)))
    looked_at = [source.val.name(index) for index in evenly(len(source.val), LOOKED_AT)]
    alike = [name for name in looked_at if _has_twin(name, names)]
    if len(alike) < max(3, 0.1 * len(looked_at)):
        return None
    return (
        f"{len(alike)} of {len(looked_at)} validation images that were looked at look like a training image beside "
        f"them, as {alike[0]}, so scores will be too good; keep each scene together, by --data.group_by or a column "
        "`group` of --data.labels"
    )


def _has_twin(name: str, names: list[str]) -> bool:
    """Whether an image looks like one of the sorted `names` just before or after it in the same folder."""
    after = bisect(names, name)
    neighbors = [
        other
        for other in names[max(0, after - 1) : after + 1]
        if Path(other).parent == Path(name).parent
    ]
    with suppress(Exception):  # a run counts and names those that cannot be read
        image = _read(name)
        most = min(SAME, OF_CONTRAST * np.abs(image - image.mean(axis=(0, 1))).mean())
        return any(np.abs(image - _read(neighbor)).mean() < most for neighbor in neighbors)
    return False


def _read(name: str) -> np.ndarray:
    with open_image(name) as image:
        return thumbnail(image)


def thumbnail(image: Image.Image, reading: Reading = AS_SEEN) -> np.ndarray:
    """An image that is open, in small: float32 [SIDE, SIDE, 3] of 0 to 255. Raises any kind of error."""
    image.draft("RGB", (2 * SIDE, 2 * SIDE))  # of a JPEG file decode an eighth
    return np.asarray(load_image(image, reading=reading).resize((SIDE, SIDE)), np.float32)

"""Read an image from its file as RGB, and list those that cannot be read; too many of them end the run.

`open_image` opens every picture of this package, so its bounds hold wherever one is read.
"""

import csv
import math
import operator
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

import numpy as np
from PIL import (  # noqa: F401  # to read their files
    AvifImagePlugin,
    ExifTags,
    Image,
    ImageColor,
    JpegImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from cait.disk import TABLE, in_its_place, open_file
from cait.errors import UserError, tell
from cait.settings import Group, Needs, PositiveInt

# Broken EXIF data do not matter to a run: it uses what can be read of them.
warnings.filterwarnings("ignore", message="Corrupt EXIF data")
# Pillow warns past MAX_IMAGE_PIXELS, 89 million, and refuses past twice that; the refusal is enough.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

with suppress(ImportError):
    from pillow_heif import register_heif_opener

    register_heif_opener()

Image.preinit()
KINDS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
FORMATS = tuple(kind for kind in KINDS if kind in Image.OPEN)
"""Pillow's names of what is opened, whatever a file is called. Pillow knows more: PostScript starts an interpreter."""
MOST_BYTES = 2**30
"""Size of the largest file that is opened."""
OPENING = (10_000, 2**28)
"""Reads and bytes that a decoder may take to open a file."""
DECODING = (2**21, 2**26)
"""Those that it may take to decode it afterwards, with 16 bytes more for each pixel."""
PADDING = b"\xff" * 1024
"""No JPEG file has so many bytes of padding in a row. Pillow would begin anew at each piece of them."""
MOST_SCANS = 100
"""Passes over a JPEG image that its file may have; a progressive one has about ten."""
MOST_ASPECT = 1000
"""Longer side over the shorter one, at most: a network's input of 224 pixels then takes 150 MB while it is made."""

RawImage = str | Path | IO[bytes] | Image.Image
"""An image as a data set has it: a path, an open file, or already decoded."""

ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, by its EXIF orientation. 1 is upright."""


@dataclass(frozen=True)
class Reading(Group):
    """How a file becomes an image in RGB. An extra may read other numbers by a class derived from this one."""

    exif_orientation: bool = True
    """Turn an image upright as its EXIF data say, as all viewers do. torchvision's ImageFolder and timm's loaders do
    not, and the published recipes do not."""
    background: Annotated[
        str | None,
        Needs("images in RGB, and data.reader reads planes", "reader", operator.not_),
    ] = "white"
    """Color behind transparent pixels, as "white" or "#8090a0". None drops the alpha channel, as those loaders do, and
    shows whatever color the file holds there."""
    shrink: PositiveInt | None = None
    """Halve an image as it is read for as long as its shorter side keeps this many pixels, in training and evaluation.
    None leaves it as it is."""
    in_chans: int = 3
    """Channels of the network. 1 makes images gray, as Pillow's mode L; in RGB, until they are normalized."""
    reader: ClassVar[str | None] = None
    """What reads images in Pillow's place; None is Pillow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with suppress(ValueError):
            if self.background is None or len(ImageColor.getrgb(self.background)) == 3:  # opaque
                return
        raise UserError(
            f"background must be a color, as white or '#8090a0', or null; got {self.background!r}"
        )

    @property
    def channels(self) -> int:
        """How many channels of an image are normalized."""
        return 1 if self.in_chans == 1 else 3

    def shrinks(self, size: tuple[int, int]) -> bool:
        """Whether an image of this size, in pixels, is halved."""
        return self.shrink is not None and min(size) >= 2 * self.shrink

    def read(self, image: RawImage) -> Any:
        """Decode an image. Raises any kind of error."""
        with open_image(image) as opened:
            # it would change the caller's image
            if self.shrink is not None and opened is not image:
                # JPEG decoders halve much faster, up to 3 times
                opened.draft(None, (self.shrink, self.shrink))
            opened.load()
            turn = ORIENTATIONS.get(orientation(opened)) if self.exif_orientation else None
            pixels = _eight_bits(opened)
            if turn is not None:
                pixels = pixels.transpose(turn)
            rgb = _as_rgb(pixels, self.background)
        while self.shrinks(rgb.size):
            rgb = rgb.reduce(2)
        return rgb.convert("L").convert("RGB") if self.in_chans == 1 else rgb

    def blank(self) -> Any:
        """The image that stands for one that cannot be read."""
        return Image.new("RGB", (8, 8))


AS_SEEN = Reading()
"""As viewers show an image, on white."""
PUBLISHED = Reading(exif_orientation=False, background=None)
"""As torchvision's ImageFolder reads, and so timm's loaders and the published recipes."""


def check_raw(image: Any, name: str) -> None:
    """Raise UserError if this is no `RawImage`."""
    if not (isinstance(image, str | Path | Image.Image) or hasattr(image, "read")):
        raise UserError(
            f"{name} is of type {type(image).__name__}; it must be a PIL image, a path or an open file"
        )


def open_bytes(image: str | Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The bytes of an image; a file is closed at the end, what is open already stays so.

    Raises OSError if it cannot be opened, UnreadableImageError if it is no regular file or has more than `MOST_BYTES`.
    """
    if isinstance(image, str | Path):
        try:
            return open_file(image, MOST_BYTES)
        except UserError as error:
            raise UnreadableImageError(
                f"cannot read the image {image}: it{str(error).removeprefix(str(image))}"
            ) from error
    if hasattr(image, "seekable") and not image.seekable():  # such as an answer over HTTP
        image = _buffered(image)
    return nullcontext(image)


def _buffered(stream: IO[bytes]) -> IO[bytes]:
    """All that is left of a stream that cannot go back."""
    buffer = BytesIO()
    while chunk := stream.read(2**20):
        buffer.write(chunk)
        if buffer.tell() > MOST_BYTES:
            raise UnreadableImageError(
                f"cannot read the image: it has more than {MOST_BYTES:,} bytes"
            )
    buffer.seek(0)
    return buffer


class Bounded:
    """An open file of an image that is read so often and so much at most: small pieces may be named by the million.

    Raises ValueError when it is read more.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.reads, self.bytes = OPENING
        self.last = b""
        """What was read last."""
        self.is_jpeg = False

    def read(self, size: int = -1) -> bytes:
        most = self.bytes + 1  # one more shows that there is more
        data = self._file.read(most if size < 0 else min(size, most))
        self.last = data
        self.reads -= 1
        self.bytes -= len(data)
        if self.reads < 0 or self.bytes < 0 or (self.is_jpeg and PADDING in data):
            raise ValueError("its file has far more parts or bytes than its pixels need")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def open_image(image: RawImage) -> Iterator[Image.Image]:
    """Open an image of one of `FORMATS` without decoding it, and close it at the end. Raises any kind of error."""
    if isinstance(image, Image.Image):  # the caller's, who may go on with it
        check_size(*image.size)
        yield image
        return
    with open_bytes(image) as file:
        bounded = Bounded(file)
        with Image.open(bounded, formats=FORMATS) as opened:
            check_size(*opened.size)
            if isinstance(opened, JpegImagePlugin.JpegImageFile):
                _check_jpeg(opened, bounded, file)
            bounded.reads, bounded.bytes = DECODING
            bounded.bytes += 16 * opened.width * opened.height
            yield opened


def _check_jpeg(opened: JpegImagePlugin.JpegImageFile, bounded: Bounded, file: IO[bytes]) -> None:
    """Raise ValueError if the file has too many scans, and refuse long padding from now on."""
    bounded.is_jpeg = True
    # in its first scan, whose header was read last
    has_all_channels = bounded.last[:1] == bytes([opened.layers])
    if has_all_channels and "progressive" not in opened.info:
        return
    position = file.tell()
    file.seek(0)
    check_scans(file.read(OPENING[1]))
    file.seek(position)


def check_scans(data: bytes) -> None:
    """Raise ValueError if a JPEG file has more than `MOST_SCANS`: each may take as long as the whole image."""
    scans = data.count(b"\xff\xda")
    if scans > MOST_SCANS:
        raise ValueError(f"its {scans:,} scans are more than {MOST_SCANS}")


def check_size(width: int, height: int) -> None:
    """Raise ValueError if no image of this size is decoded: Pillow's limit, unless it is turned off, and ours."""
    size = f"its {width:,} × {height:,} pixels"
    most = 2 * (Image.MAX_IMAGE_PIXELS or math.inf)
    longer = max(width, height)
    shorter = min(width, height)
    if width * height > most:
        raise ValueError(f"{size} are more than {most:,}")
    if longer > MOST_ASPECT * shorter:
        raise ValueError(f"one side of {size} is over {MOST_ASPECT:,} times the other")


def load_image(image: RawImage, name: str = "", reading: Reading = AS_SEEN) -> Any:
    """Read an image in any of `FORMATS` and of Pillow's modes as RGB; errors call it by its path, or else by `name`.

    An extra's `Reading` may give other numbers. Raises UnreadableImageError if the file is missing, truncated, too
    large or no image.
    """
    try:
        return reading.read(image)
    except UserError:  # from the data set that it is read from, which cannot go on
        raise
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, ValueError, struct.error ...
        path = image if isinstance(image, str | Path) else None
        raise UnreadableImageError(
            f"cannot read the image {path or name or 'given'}: {_reason(error, path)}"
        ) from error


def _reason(error: Exception, path: str | Path | None) -> str:
    """Why an image, perhaps a file, cannot be read."""
    if not isinstance(error, Image.UnidentifiedImageError):
        return str(getattr(error, "strerror", None) or error)
    if str(path).lower().endswith((".tif", ".tiff")):  # Pillow reads few kinds of floats
        return "not an image that Pillow reads: save it with 8 or 16 bits a channel"
    return "not an image" + (in_its_place(path) if path else "")


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 if EXIF data are missing or broken."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as Pillow's decoders do
        return 1
    return value if value in ORIENTATIONS else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of more than 8 bits with 8; Pillow would cut it off at 255. Raises ValueError if its white is not known."""
    tags = getattr(image, "tag_v2", {})  # TIFF alone has tags
    bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
    is_signed = tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 2
    is_raw = image.info.get("compression") == "raw"  # libtiff reads the others
    if not is_signed and not image.mode.startswith(("I", "F")):  # no gray of more than 8 bits
        if is_raw and bits > 8 and tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2:
            raise ValueError(
                "its channels of more than 8 bits lie one after the other, which Pillow reads wrong"
            )
        return image
    pixels = np.asarray(image)
    is_float = image.mode == "F"
    may_have_32_bits = image.mode == "I" and image.format != "PPM" and (tags or pixels.max() < 256)
    if is_signed or may_have_32_bits:
        raise ValueError(
            "its whole numbers are signed or of 32 bits: which is white? Save it with 8 or 16 bits"
        )
    if is_float and not is_raw and getattr(tags, "prefix", b"") == b"MM":
        raise ValueError(
            "its floating-point numbers are compressed and big-endian, which Pillow reads wrong"
        )
    least, most = pixels.min(), pixels.max()
    white = 1 if is_float else 2**bits - 1
    if not 0 <= least <= most <= white:
        raise ValueError(
            f"its pixels reach from {least:g} to {most:g}; 0 is read as black and {white:,} as white"
        )
    gray = np.rint(255 * pixels) if is_float else pixels >> (bits - 8)
    # white is 0; Pillow turns 8 bits alone
    if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
        gray = 255 - gray
    return Image.fromarray(gray.astype(np.uint8))


def _as_rgb(image: Image.Image, background: str | None) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    pixels = image.convert("RGBA")
    if background is None:
        return pixels.convert("RGB")
    rgb = Image.new("RGB", pixels.size, background)
    rgb.paste(pixels, mask=pixels)
    return rgb


class UnreadableImageError(UserError):
    """An image cannot be read. In training another stands in for it, in validation it is left out."""

    @staticmethod
    def is_said_by(error: Exception) -> bool:
        """Whether a data set's error says so: it is an error of a file, or of any kind in one of Pillow's decoders."""
        if isinstance(error, OSError | Image.DecompressionBombError):
            return True
        files = [Path(call.filename) for call in traceback.extract_tb(error.__traceback__)]
        of_pillow = takewhile(
            lambda file: file.parent.name in ("PIL", "pillow_heif"), reversed(files)
        )
        return any(file.name.lower().endswith(("plugin.py", "imagefile.py")) for file in of_pillow)


HEADER = ["image", "reason"]


class UnreadableImages:
    """The images that could not be read, shared by all loader processes through a file.

    Args:
        path: CSV file of image and reason, to which every process appends; None keeps no file.
        limit: how many images may be unreadable before the run fails; None sets no limit.
    """

    def __init__(self, path: Path | None = None, limit: int | None = None) -> None:
        self.path, self.limit = path, limit
        self.seen: set[str] = set()
        """Names of the unreadable images that this process has met."""

    def note(self, image: str, reason: str) -> None:
        """Note an image once, and say so of the process's first. Raises UserError if there are more than `limit`."""
        if image in self.seen:
            return
        self.seen.add(image)
        if self.path is not None:
            rows = [[image, reason]]
            if not self.path.exists():  # two processes may both begin the file
                rows.insert(0, HEADER)
            # One short write in append mode, so that processes do not write into each other's lines.
            with self.path.open("a", **TABLE) as file:
                csv.writer(file).writerows(rows)
        self._check(len(self.seen), reason)
        if len(self.seen) == 1 and self.path is not None:
            tell(f"{reason}; the run goes on without it, and {self.path} lists all such images")

    def read(self) -> dict[str, str]:
        """Reason by image, from all processes, since the run was started or resumed."""
        if self.path is None or not self.path.is_file():
            return {}
        with self.path.open(**TABLE) as file:
            return dict(row for row in csv.reader(file) if len(row) == 2 and row != HEADER)

    def check(self) -> int:
        """How many images all processes have noted; this one notes none again. Raises UserError past `limit`."""
        reasons = self.read()
        self.seen.update(reasons)  # workers that are started later inherit this
        self._check(len(reasons), next(iter(reasons.values()), ""))
        return len(reasons)

    def _check(self, count: int, reason: str) -> None:
        if self.limit is None or count <= self.limit:
            return
        listed = f"; they are listed in {self.path}" if self.path else ""
        raise UserError(
            f"{count} images cannot be read, {self.limit} are allowed: {reason}{listed}; "
            "to go on without them give a larger --data.max_bad_share"
        )

"""What `cait shards` changes in the training images: large ones made smaller, or pixels in place of image files."""

from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any

from PIL import ExifTags, Image

from cait.data.dataset import Samples
from cait.data.reading import (
    PUBLISHED,
    Reading,
    load_image,
    open_bytes,
    open_image,
    orientation,
)
from cait.errors import UserError
from cait.extras.features import evenly
from cait.settings import Group, In, PositiveInt, Settings, as_text

LOOKED_AT = 5
"""Training images that must all be planes for a set to count as one of planes."""


@dataclass(frozen=True)
class Pixels(Group):
    """How a training image is stored. A file that Pillow cannot read stays as it is: a run replaces and lists it."""

    max_side: PositiveInt | None = None
    """Images with a longer side than this are made smaller; None leaves their size."""
    quality: Annotated[int, In("[1, 100]")] = 95
    """JPEG quality of an image that is made smaller."""
    raw: bool = False
    """Store each image as a PPM file, which holds RGB pixels, uint8 [height, width, 3], behind a short header."""
    exif_orientation: bool = True
    """Whether raw pixels are turned upright."""
    background: str | None = "white"
    """Color behind transparent raw pixels, as in `Reading`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Reading(background=self.background)

    def __str__(self) -> str:
        size = f", at most {self.max_side} pixels a side" if self.max_side else ""
        if not self.raw:
            return f"JPEG of quality {self.quality}{size}"
        upright = "upright" if self.exif_orientation else "as stored"
        return f"raw pixels{size}, {upright}, {f'on {self.background}' if self.background else 'without alpha'}"

    def used(self) -> Settings:
        """The settings that matter, for shards.json."""
        names = [
            "max_side",
            "raw",
            *(["exif_orientation", "background"] if self.raw else ["quality"]),
        ]
        return {name: getattr(self, name) for name in names}

    def check(self, settings: Settings) -> None:
        """Raise UserError if a run with these settings would read other pixels from the whole files."""
        if settings.get("reader"):
            raise UserError(
                f"the shards hold {self}, in RGB, and data.reader reads whole files: "
                "make the shards again without --max_side and --raw"
            )
        for name in ("exif_orientation", "background") if self.raw else ():
            stored, wanted = (
                as_text(value).lower() for value in (getattr(self, name), settings[name])
            )
            if stored != wanted:
                raise UserError(
                    f"the raw pixels of the shards are of {name} {stored}, the run has {wanted}: "
                    f"give --data.{name} {stored}, or make the shards again"
                )

    def check_set(self, samples: Samples) -> None:
        """Raise UserError if the training images are planes of numbers, which would become RGB of 8 bits."""
        indices = evenly(len(samples), LOOKED_AT)
        if all(_is_deep(samples[index][0]) for index in indices):
            raise UserError(
                f"{samples.name(0)} and others have more than 8 bits a channel, which --max_side and --raw "
                "would cut off: leave these out"
            )

    def stored(self, data: bytes, name: str) -> bytes:
        """What is stored in place of an image file."""
        try:
            with open_image(BytesIO(data)) as image:
                if self.raw:
                    plain = load_image(image, name, Reading(self.exif_orientation, self.background))
                elif self._size(image.size) == image.size:
                    return data
                else:
                    image.load()
                    turned = orientation(image)
                    plain = as_plain(image, name)
        except Exception:  # of many kinds, by Pillow's decoders
            return data
        size = self._size(plain.size)
        if size != plain.size:
            # Of Pillow's filters Lanczos keeps most of what a crop shows afterwards; BOX, at 500 to 400, is uneven.
            plain = plain.resize(size, Image.Resampling.LANCZOS)
        plain.info.clear()  # color profiles and comments, which no run reads
        if self.raw:
            return _saved(plain, "PPM")
        if plain.mode == "RGBA":
            if plain.getextrema()[3] != (255, 255):  # something is transparent
                return _saved(plain, "PNG", turned)
            plain = plain.convert("RGB")
        # Colors keep half the resolution, Pillow's default: the files are smaller and decoded faster.
        return _saved(plain, "JPEG", turned, quality=self.quality)

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height in which an image of this size is stored."""
        longer = max(size)
        if not self.max_side or longer <= self.max_side:
            return size
        width, height = (max(1, round(side * self.max_side / longer)) for side in size)
        return width, height


def _is_deep(raw: Any) -> bool:
    """Whether a file has numbers of more than 8 bits, or is an array or a TIFF file that Pillow does not know."""
    if isinstance(raw, Image.Image):
        return False
    with open_bytes(raw) as file:
        data = file.read()
    try:
        with open_image(BytesIO(data)) as image:
            return image.mode[:1] in "IF" or ";16" in str(getattr(image, "tile", ""))
    except Exception:  # of many kinds, by Pillow's decoders
        return data.startswith((b"\x93NUMPY", b"II", b"MM")) or data[128:132] == b"DICM"


def as_png(image: Image.Image, name: str) -> bytes:
    """A PNG file with the same pixels, alpha channel and EXIF orientation. Raises UnreadableImageError."""
    return _saved(as_plain(image, name), "PNG", orientation(image))


def as_plain(image: Image.Image, name: str) -> Image.Image:
    """The image as it is stored, in mode RGBA if it has transparent pixels, otherwise in L or RGB."""
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image if image.mode == "L" else load_image(image, name, PUBLISHED)


def _saved(image: Image.Image, kind: str, turned: int = 1, **settings: Any) -> bytes:
    if turned != 1:
        settings["exif"] = Image.Exif()
        settings["exif"][ExifTags.Base.Orientation] = turned
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()

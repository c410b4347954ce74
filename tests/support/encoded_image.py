"""Images as the bytes of files."""

from io import BytesIO
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str = "JPEG", **settings: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()

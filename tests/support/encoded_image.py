"""Images as the bytes of files."""

from io import BytesIO


def encoded(image, kind="JPEG", **settings):
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()

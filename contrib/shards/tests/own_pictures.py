"""A data set of one's own."""

import numpy as np
from PIL import ExifTags, Image


class OwnPictures:
    """Images in memory: of more than 8 bits, clear ones and turned ones; one has no class."""

    classes = ("a", "b")

    def __init__(self, split):
        self.first = 8 if split == "val" else 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        number = index + self.first
        values = 600 * np.arange(96).reshape(8, 12) + number
        image = Image.fromarray(values.astype(np.int32))
        if number % 3 == 1:
            image = Image.fromarray(values.astype(np.uint8)).convert("RGBA")
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        if number % 2:
            image.getexif()[ExifTags.Base.Orientation] = 8
        return image, -1 if number == 9 else number % 2

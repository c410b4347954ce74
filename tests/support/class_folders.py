"""Class folders of noise, of a few images, and of files where nothing is decoded."""

import shutil

import numpy as np
from PIL import Image


def fill(root, images, size=24, gray=False, suffix=".png"):
    """Class folders of noise around a color of their own."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(images.items()):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        color = np.zeros(3, int)
        color[label % 3] = 150
        for number in range(count):
            pixels = color + rng.integers(0, 80, (size, size, 3))
            image = Image.fromarray(pixels.astype(np.uint8))
            if gray:
                image = image.convert("L")
            image.save(folder / f"{number:03d}{suffix}")
    return root


def write_files(root, names):
    """Files below `root`, each with its name in it, so that no two are alike."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, errors="surrogateescape")
    return root


def fill_with_few(target, source, train=20, val=8):
    """So many images of each class of `source`, which has train and val folders."""
    for part, count in (("train", train), ("val", val)):
        for folder in (source / part).iterdir():
            (target / part / folder.name).mkdir(parents=True)
            for image in sorted(folder.iterdir())[:count]:
                shutil.copy(image, target / part / folder.name)
    return target

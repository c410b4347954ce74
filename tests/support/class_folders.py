"""Class folders of noise."""

from pathlib import Path

import numpy as np
from PIL import Image


def fill(
    root: Path, images: dict[str, int], size: int = 24, gray: bool = False, suffix: str = ".png"
) -> Path:
    """Class folders of noise around a color of their own."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(images.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 80, (size, size, 3)) + np.eye(3, dtype=int)[label % 3] * 150
            image = Image.fromarray(pixels.astype(np.uint8))
            (image.convert("L") if gray else image).save(root / name / f"{number:03d}{suffix}")
    return root

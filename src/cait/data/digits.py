"""The embedded data set: scikit-learn's 1,797 handwritten digits, 8×8 pixels, as a folder of PNG files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

ROOT = Path("data/digits")


def write_digits(root: Path) -> None:
    """Write `root/{train,val}/<digit>/<number>.png` unless it is there: 1,437 and 360 images, always the same split.

    One rename puts the folder in place, so it is either whole or absent.
    """
    if root.is_dir() and any(root.iterdir()):
        return
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    numbers = np.arange(len(digits.target))
    _, val = train_test_split(numbers, test_size=0.2, random_state=0, stratify=digits.target)
    held_out = set(val.tolist())
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            folder = scratch / ("val" if number in held_out else "train") / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            grey = np.round(pixels * (255 / 16)).astype(np.uint8)
            Image.fromarray(grey).save(folder / f"{number:04d}.png")
        scratch.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        scratch.rename(root)  # replaces an empty folder too
    except OSError:
        if not (root / "val").is_dir():  # otherwise another run was quicker
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

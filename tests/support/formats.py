"""Small data sets in the very files of the published ones.

Only the MD5 sums that torchvision compares them with are put in the place of the published files'.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

Photographs = list[Image.Image]


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def pixels(count: int, seed: int) -> np.ndarray:
    """Pictures [count, 3, 32, 32] that differ."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def save(photographs: Photographs, path: Path, number: int) -> None:
    """A photograph cut out at a place of its own, as a JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = 7 * number % 400
    photographs[number % 2].crop((left, left % 200, left + 96, left % 200 + 80)).save(path, format="JPEG")


def write_cifar10(folder: Path, patch: pytest.MonkeyPatch, photographs: Photographs) -> None:
    """Batches as Python 2 pickled them: rows of 3,072 bytes, all of red, then green, then blue."""
    kind = datasets.CIFAR10
    base = folder / kind.base_folder
    base.mkdir(parents=True)

    def dump(file: str, content: dict) -> str:
        (base / file).write_bytes(pickle.dumps(content, protocol=2))
        return md5(base / file)

    for part, count in (("train_list", 8), ("test_list", 6)):
        sums = []
        for number, (file, _) in enumerate(getattr(kind, part)):
            batch = {"labels": [*range(count)], "data": pixels(count, number).reshape(count, -1)}
            sums.append([file, dump(file, batch)])
        patch.setattr(kind, part, sums)
    names = {kind.meta["key"]: [f"class {i}" for i in range(10)]}
    patch.setattr(kind, "meta", kind.meta | {"md5": dump(kind.meta["filename"], names)})


FLOWERS = (("trnid", 1), ("valid", 7), ("tstid", 13))


def write_flowers(folder: Path, patch: pytest.MonkeyPatch, photographs: Photographs) -> None:
    base = folder / "flowers-102"
    for number in range(1, 19):
        save(photographs, base / "jpg" / f"image_{number:05d}.jpg", number)
    savemat(base / "imagelabels.mat", {"labels": np.arange(1, 19, dtype=np.uint8)[None] * 5})  # from 1, up to 102
    savemat(base / "setid.mat", {name: np.arange(i, i + 6)[None] for name, i in FLOWERS})
    files = datasets.Flowers102._file_dict
    sums = {key: (name, md5(base / name)) for key, (name, _) in files.items() if key != "image"}
    patch.setattr(datasets.Flowers102, "_file_dict", files | sums)

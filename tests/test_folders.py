"""The folders on which recipes are judged."""

from __future__ import annotations

import numpy as np
import pytest
from folders import Packages, write
from PIL import Image


def test_a_group_lies_on_one_side_and_a_fifth_is_held_out(tmp_path):
    shades = {f"{group}": [group * 8 + variant for variant in range(5)] for group in range(20)}
    items = [
        (label, group, Image.new("L", (2, 2), shade))
        for label in ("a", "b")
        for group, members in shades.items()
        for shade in members
    ]
    for name in ("once", "again"):
        write(tmp_path / name, items, 0.2)
    sides = {}
    for label in ("a", "b"):
        for split in ("train", "val"):
            files = sorted((tmp_path / "once" / split / label).iterdir())
            sides[split] = {int(np.asarray(Image.open(file))[0, 0]) // 8 for file in files}
            assert len(files) == {"train": 80, "val": 20}[split]
        assert not sides["train"] & sides["val"]
    written = [file.relative_to(tmp_path / "once") for file in sorted((tmp_path / "once").rglob("*.png"))]
    assert all((tmp_path / "again" / file).read_bytes() == (tmp_path / "once" / file).read_bytes() for file in written)


def test_a_package_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no client is on it
    with pytest.raises(SystemExit, match=r"^the package fonts-nowhere cannot be had: `apt-get .*there is no apt-get$"):
        Packages(tmp_path).debian("fonts-nowhere")

"""Reading ahead changes neither the images nor what is told of those that cannot be read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras.fast_input.ahead import Ahead


def module(root: Path, **settings: Any) -> ImageNetDataModule:
    common = dict(img_size=32, batch_size=8, num_workers=0, repeats=2, max_bad_share=0.2)
    data = ImageNetDataModule(str(root), **(common | settings))
    data.setup("fit")
    return data


@pytest.mark.parametrize("settings", [{}, {"backend": "pillow"}, {"backend": "timm"}, {"num_workers": 1}])
def test_a_batch_is_the_same_read_ahead(
    settings: dict[str, Any], mixed_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced, begin = [], Ahead.ahead
    monkeypatch.setattr(Ahead, "ahead", lambda self, indices: (announced.extend(indices), begin(self, indices)))
    (mixed_root / "train/cat/0.jpg").write_bytes(b"<html>")
    gone = mixed_root / "train/dog/2.png"
    gone.unlink()
    gone.symlink_to("/nowhere/gone.png")
    plain, ahead = module(mixed_root, **settings), module(mixed_root, read_ahead=3, **settings)
    assert isinstance(ahead.train_images.samples, Ahead)
    assert ahead.state_dict() == plain.state_dict()
    for ours, theirs in zip(ahead.train_dataloader(), plain.train_dataloader(), strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert ahead.unreadable.seen == plain.unreadable.seen
    if not settings.get("num_workers"):
        assert len(announced) == 8 * len(ahead.train_dataloader())
        assert {str(gone), str(mixed_root / "train/cat/0.jpg")} <= ahead.unreadable.seen


def test_images_are_read_at_the_same_time(photographs: list[Image.Image]) -> None:
    together = threading.Barrier(4)

    class Slow:
        labels = (7,) * 8

        def __len__(self) -> int:
            return 8

        def name(self, index: int) -> str:
            return str(index)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            together.wait(timeout=60)  # breaks unless four are being read
            return photographs[index % 2], index

    samples = Ahead(Slow(), 4)
    samples.ahead([0, 1, 2, 3, 3, 1])
    assert [samples[index][1] for index in range(4)] == [0, 1, 2, 3]
    assert samples.labels == Slow.labels
    samples.ahead([4, 5, 6, 7])
    assert samples[6][0] is photographs[0]


def test_what_ends_a_run_ends_it_read_ahead() -> None:
    class Torn:
        def __getitem__(self, index: int) -> Any:
            raise UserError("chunk 3 is cut off")

    samples = Ahead(Torn(), 2)  # type: ignore[arg-type]
    samples.ahead([3])
    with pytest.raises(UserError, match="chunk 3 is cut off"):
        samples[3]
    with pytest.raises(UserError, match="read_ahead must be at least 0"):
        ImageNetDataModule("nowhere", read_ahead=-1)

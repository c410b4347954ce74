"""Shards: the same bits as from the folder they were made of, from a disk and from S3; made again the same."""

from __future__ import annotations

import csv
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import formats
import loopback
import numpy as np
import pytest
import torch
from conftest import LIMIT, SMALL, checkpoint, rows, start
from PIL import Image
from test_survival import BREAKS, RECIPE, TWO, assert_same, wait_for_steps
from torchvision import datasets

from cait.cli import main
from cait.data import bucket, making
from cait.data.bucket import Bucket, Piece
from cait.data.folder import load_rgb
from cait.data.sampler import TrainBatchSampler
from cait.data.shards import ShardSamples, ShardSource
from cait.datamodule import ImageNetDataModule
from cait.errors import UserError


def module(root: Path | str, **settings: object) -> ImageNetDataModule:
    data = ImageNetDataModule(str(root), **(dict(img_size=32, batch_size=4, num_workers=0, repeats=2) | settings))
    data.setup("fit")
    return data


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def make(root: Path | str, out: Path, *options: str) -> Path:
    main(["shards", str(root), str(out), *options])
    return out


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command is refused."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("cait: error: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture(scope="module")
def s3() -> Iterator[loopback.Requests]:
    with loopback.server() as requests:
        yield requests


@pytest.fixture(scope="module")
def digit_shards(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(digits_root, tmp_path_factory.mktemp("shards") / "digits", "--images", "100", "--workers", "2")


@pytest.fixture(scope="module")
def digits_address(digit_shards: Path, s3: loopback.Requests) -> str:
    return loopback.upload(digit_shards, "digits")


def batches(root: Path | str, **settings: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = module(root, **settings)
    return [*data.train_dataloader(), *data.val_dataloader()]


def assert_equal_batches(ours: list, theirs: list) -> None:
    for (images, labels), (others, other_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_a_folder_of_every_mode_gives_the_same_batches_from_all_places(
    mixed_root: Path, tmp_path: Path, s3: loopback.Requests
) -> None:
    # A file that is no image, and a name that is no text.
    (mixed_root / "train/cat/0.jpg").write_bytes(b"<html>")
    (mixed_root / "val/owl/5.JPEG").write_bytes(b"")
    odd = Path(os.fsdecode(os.fsencode(mixed_root / "train/dog") + b"/\xff.png"))
    (mixed_root / "train/dog/2.png").rename(odd)
    out = make(mixed_root, tmp_path / "shards", "--images", "5", "--workers", "0")
    address = loopback.upload(out, "mixed")
    expected = module(mixed_root, max_bad_share=0.1)
    whole = [*expected.train_dataloader(), *expected.val_dataloader()]
    cache = dict(data_dir=str(tmp_path / "cache"))
    for root, settings in ((out, {}), (out, dict(num_workers=2)), (address, cache), (address, dict(cache_gb=1e-3))):
        data = module(root, max_bad_share=0.1, **(cache | settings))
        # All that a checkpoint compares: a run may go on from there.
        assert data.state_dict() == expected.state_dict()
        data.unreadable_path = None
        assert_equal_batches([*data.train_dataloader(), *data.val_dataloader()], whole)
        for ours, theirs in ((data.train_images, expected.train_images), (data.val_images, expected.val_images)):
            for index in range(len(theirs)):
                path, label = theirs.samples[index]
                raw, our_label = ours.samples[index]
                assert (raw.getvalue(), our_label) == (Path(path).read_bytes(), label)
                assert ours.samples.name(index) == path.replace(str(mixed_root), str(root))
        assert {path.replace(str(root), "") for path in data.unreadable.seen} == (
            set() if settings.get("num_workers") else {"/train/cat/0.jpg", "/val/owl/5.JPEG"}
        )


def test_litdata_reads_them_too(digit_shards: Path, digits_root: Path) -> None:
    from litdata import StreamingDataset

    theirs = StreamingDataset(str(digit_shards / "val"))
    ours = ShardSource(str(digit_shards)).val
    assert len(theirs) == len(ours) == 360
    for index in (0, 99, 100, 359):
        data, label = theirs[index]
        assert (bytes(data), label) == (ours[index][0].getvalue(), ours[index][1])

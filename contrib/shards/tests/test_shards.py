"""Shards: made again the same after any kill, read by LitData too, and never damaged without a word."""

import errno
import hashlib
import json
import os
import shutil
import time
from io import BytesIO
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from harness import LIMIT
from shard_sets import make, module

from cait.cli import main
from cait.data.folder import Splits
from cait.data.loader import TrainBatchSampler
from cait.data.source import open_source
from cait.errors import UserError
from contrib.shards import Shards
from contrib.shards.source import ShardSource, Windowed

DAMAGES = yaml.safe_load(Path(__file__).with_name("damages.yaml").read_text())


def test_litdata_reads_them_too(digit_shards):
    from litdata import StreamingDataset

    theirs = StreamingDataset(str(digit_shards / "val"))
    ours = ShardSource(Splits(str(digit_shards)), Shards()).val
    assert len(theirs) == len(ours) == 360
    for index in (0, 99, 100, 359):
        content, label = theirs[index]
        our_content, our_label = ours[index]
        assert (bytes(content), label) == (our_content.getvalue(), our_label)


# Making them


def tree(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}


def kill_after(chunks, root, shards, workers):
    """Make shards in a process of its own, and kill it once so many chunks are there."""
    words = (root, shards, "--images=40", f"--workers={workers}")
    process = get_context("fork").Process(target=make, args=words)
    process.start()
    end = time.monotonic() + LIMIT
    while len([*shards.glob("[tv]*/chunk-*.bin")]) < chunks:
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    process.join()


def refusal(capsys, *words):
    """The line with which the making is refused."""
    with pytest.raises(SystemExit):
        make(*words)
    return capsys.readouterr().err


@pytest.mark.parametrize("kills", [(3,), pytest.param((1, 8, 15, 25, 40), marks=pytest.mark.slow)])
def test_a_making_that_is_killed_goes_on_to_the_same_files(kills, digits_root, tmp_path, capsys):
    shards = tmp_path / "killed"
    for number, chunks in enumerate(kills):
        kill_after(chunks, digits_root, shards, workers=number % 3)
        assert not (shards / "shards.json").exists()
    with pytest.raises(UserError, match="not finished"):
        module(shards)
    other = (digits_root, shards, "--images=41")
    assert "other shards" in refusal(capsys, *other)
    before = {path: path.stat().st_mtime_ns for path in shards.glob("[tv]*/chunk-*.bin")}
    assert len(before) >= kills[-1]
    make(digits_root, shards, "--images=40", "--workers=1")
    for path, changed in before.items():
        assert path.stat().st_mtime_ns == changed  # what was made is not made again
    whole = make(digits_root, tmp_path / "whole", "--images=40", "--workers=2")
    assert tree(shards) == tree(whole)
    assert "is not an empty folder" in refusal(capsys, *other)
    source = open_source(str(shards))
    assert (len(source.train), len(source.val)) == (1437, 360)
    assert [*source.verify()] == []


def test_an_image_that_cannot_be_read_is_not_left_out(mixed_root, tmp_path, capsys):
    image = mixed_root / "train/dog/2.png"
    image.unlink()
    image.symlink_to("/nowhere/gone.png")
    words = (mixed_root, tmp_path / "shards", "--workers=1")
    assert f"cannot read the image {image}: No such file" in refusal(capsys, *words)


# What cannot be read


def flip(path):
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_index(shards, content):
    """Other values in shards.json, or another file of that name."""
    path = shards / "shards.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | content if isinstance(content, dict) else content))


def replace_table(shards, content):
    """Another table of the training images, with its right checksum."""
    (shards / "train/images.npz").write_bytes(content)
    train = json.loads((shards / "shards.json").read_text())["train"]
    train["table"] = [len(content), hashlib.sha256(content).hexdigest()]
    edit_index(shards, {"train": train})


def packed(**columns):
    file = BytesIO()
    np.savez_compressed(file, **columns)
    return file.getvalue()


CHANGES = {
    "removed": lambda shards, name: (shards / name).unlink(),
    "cut": lambda shards, name: os.truncate(shards / name, 99),
    "flipped": lambda shards, name: flip(shards / name),
    "index": edit_index,
    "table": lambda shards, text: replace_table(shards, text.encode()),
    "columns": lambda shards, columns: replace_table(shards, packed(**columns)),
    "zeros": lambda shards, count: replace_table(
        shards, packed(names=np.broadcast_to(np.uint8(0), count))
    ),
    "settings": lambda *_: None,
}
"""What a damage does to shards."""


@pytest.fixture
def copy(digit_shards, tmp_path):
    """Shards to damage."""
    return shutil.copytree(digit_shards, tmp_path / "copy")


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage["case"] for damage in DAMAGES])
def test_shards_that_are_not_whole_are_told(damage, copy):
    for name in damage.keys() & CHANGES.keys():
        CHANGES[name](copy, damage[name])
    with pytest.raises(UserError) as raised:
        module(copy, **damage.get("settings", {}))
    assert damage["says"].format(shards=copy) in str(raised.value)


def test_a_damaged_chunk_is_found_by_the_check(copy, capsys):
    pytest.importorskip("cait.extras.datacheck")
    main(["check", str(copy), "--images", "20"])
    assert f"{copy}/train: 15 chunk(s), checksums compared" in capsys.readouterr().out
    flip(copy / "train/chunk-0-2.bin")
    with pytest.raises(SystemExit):
        main(["check", str(copy)])
    assert f"wrong: {copy}/train/chunk-0-2.bin is damaged" in capsys.readouterr().out


def test_a_failing_disk_ends_the_run(copy, monkeypatch):
    data = module(copy)

    def fail(*_):
        raise OSError(errno.EIO, "of the disk")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(UserError, match=r"/train/chunk-0-\d+\.bin: of the disk$"):
        data.train_images[(0, 5, 0)]
    assert not data.unreadable.seen


# The windowed order


def sampled(epoch=0, length=1000, first_batch=0, **settings):
    """The keys of an epoch: 20 chunks of images, four of them open at a time."""
    order = Windowed(torch.arange(length) % 20, window=4)
    sampler = TrainBatchSampler(length, 10, seed=3, order=order, **settings)
    sampler.epoch = epoch
    sampler.first_batch = first_batch
    return [key for batch in sampler for key in batch]


def indices(keys):
    return [index for _, index, _ in keys]


def test_the_windowed_order_has_every_image_once_and_few_chunks_at_a_time():
    order = indices(sampled())
    assert sorted(order) == list(range(1000))
    assert order == indices(sampled())
    assert order != indices(sampled(epoch=1))
    chunks = np.array(order) % 20
    is_open = np.zeros((20, 1000), bool)
    for chunk in range(20):
        (times,) = np.nonzero(chunks == chunk)
        is_open[chunk, times[0] : times[-1] + 1] = True
    assert is_open.sum(axis=0).max() <= 4
    assert is_open.sum(axis=0)[100:-100].min() >= 3
    # Within them it is random: neighbors are of one chunk as rarely as four chunks allow.
    assert 0.15 < np.mean([a == b for a, b in pairwise(chunks[200:800])]) < 0.35


def test_ranks_repeats_and_a_resume_share_out_the_windowed_order():
    whole = sampled(repeats=3)
    once = indices(sampled())
    assert [repeat for _, _, repeat in whole[:6]] == [0, 1, 2, 0, 1, 2]
    assert indices(whole[::3]) == once[: len(whole[::3])]
    first, second = (sampled(repeats=3, rank=rank, world_size=2) for rank in range(2))
    together = [key for pair in zip(first, second, strict=True) for key in pair]
    assert together == whole[: len(together)]
    assert indices(sampled(first_batch=7)) == once[70:]


def test_another_order_is_other_data_for_a_resume(digit_shards):
    windowed = module(digit_shards, order="windowed").state_dict()
    assert windowed != module(digit_shards, order="windowed", window=7).state_dict()
    assert windowed != module(digit_shards).state_dict()

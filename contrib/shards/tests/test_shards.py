"""Shards: made again the same after any kill, read by LitData too, and never damaged without a word."""

import errno
import hashlib
import json
import os
import shutil
import time
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from harness import LIMIT, over_table, parsed, table
from shard_sets import make, module

from cait.cli import main
from cait.data.loader import TrainBatchSampler
from cait.data.source import open_source
from cait.errors import UserError
from contrib.shards.source import Windowed


def test_litdata_reads_them_too(digit_shards):
    from litdata import StreamingDataset

    theirs = StreamingDataset(str(digit_shards / "val"))
    ours = open_source(str(digit_shards)).val
    assert len(theirs) == len(ours) == 360
    for index in (0, 99, 100, 359):
        image, label = ours[index]
        content, expected = theirs[index]
        assert (image.getvalue(), label) == (bytes(content), expected)


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


@over_table(__file__, "making")
def test_a_making_that_is_killed_goes_on_to_the_same_files(kills, digits_root, tmp_path, capsys):
    shards = tmp_path / "killed"
    for number, chunks in enumerate(kills):
        kill_after(chunks, digits_root, shards, workers=number % 3)
        assert not (shards / "shards.json").exists()
    with pytest.raises(UserError, match="not finished"):
        module(shards)
    other = (digits_root, shards, "--images=41")
    assert "other shards" in refusal(capsys, *other)
    made = {path: path.stat().st_mtime_ns for path in shards.glob("[tv]*/chunk-*.bin")}
    assert len(made) >= kills[-1]
    make(digits_root, shards, "--images=40", "--workers=1")
    assert {path: path.stat().st_mtime_ns for path in made} == made  # it is not made again
    make(digits_root, tmp_path / "whole", "--images=40", "--workers=2")
    assert tree(shards) == tree(tmp_path / "whole")
    assert "is not an empty folder" in refusal(capsys, *other)
    source = open_source(str(shards))
    assert (len(source.train), len(source.val)) == (1437, 360)
    assert [*source.verify()] == []


def test_an_image_that_cannot_be_read_is_not_left_out(mixed_root, tmp_path, capsys):
    image = mixed_root / "train/dog/gone.png"
    image.symlink_to("/nowhere/gone.png")
    words = (mixed_root, tmp_path / "shards", "--workers=1")
    assert f"cannot read the image {image}: No such file" in refusal(capsys, *words)


# What cannot be read


def flip(path):
    """Change the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def damage(shards, row):
    """What a row of damages does to shards."""
    table = shards / "train/images.npz"
    if "text" in row:
        table.write_text(row["text"])
    if "columns" in row:
        np.savez_compressed(table, **row["columns"])
    if "zeros" in row:
        np.savez_compressed(table, names=np.broadcast_to(np.uint8(0), row["zeros"]))
    content = table.read_bytes()
    index = parsed(shards / "shards.json")
    index["train"]["table"] = [len(content), hashlib.sha256(content).hexdigest()]
    index |= row.get("index", {})
    (shards / "shards.json").write_text(json.dumps(row.get("whole_index", index)))
    if "removed" in row:
        (shards / row["removed"]).unlink()
    if "cut" in row:
        os.truncate(shards / row["cut"], 99)
    if "flipped" in row:
        flip(shards / row["flipped"])


@pytest.fixture
def copy(digit_shards, tmp_path):
    """Shards to damage."""
    return shutil.copytree(digit_shards, tmp_path / "copy")


@pytest.mark.parametrize("row", table(__file__, "damages"))
def test_shards_that_are_not_whole_are_told(row, copy):
    damage(copy, row)
    with pytest.raises(UserError) as raised:
        module(copy, **row.get("settings", {}))
    assert row["says"].format(shards=copy) in str(raised.value)


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


def order_of(epoch):
    """1,000 images in 20 chunks, four of them open at a time."""
    sampler = TrainBatchSampler(1000, 10, seed=3, order=Windowed(torch.arange(1000) % 20, window=4))
    sampler.epoch = epoch
    return [index for batch in sampler for _, index, _ in batch]


def test_the_windowed_order_has_every_image_once_and_few_chunks_at_a_time():
    order = order_of(epoch=0)
    assert sorted(order) == list(range(1000))
    assert order_of(epoch=0) == order != order_of(epoch=1)
    chunks = np.array(order) % 20
    is_open = np.zeros((20, 1000), bool)
    for chunk in range(20):
        (times,) = np.nonzero(chunks == chunk)
        is_open[chunk, times[0] : times[-1] + 1] = True
    assert is_open.sum(axis=0).max() == 4
    assert is_open.sum(axis=0)[100:-100].min() >= 3
    # Within them it is random: neighbors are of one chunk as rarely as four chunks allow.
    assert 0.15 < np.mean(chunks[200:799] == chunks[201:800]) < 0.35


def test_another_order_is_other_data_for_a_resume(digit_shards):
    windowed = module(digit_shards, order="windowed").state_dict()
    assert windowed != module(digit_shards, order="windowed", window=7).state_dict()
    assert windowed != module(digit_shards).state_dict()

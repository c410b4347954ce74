"""Shards: the same bits as from the folder they were made of, from a disk and from S3; made again the same."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import formats
import loopback
import numpy as np
import pytest
import torch
from harness import LIMIT, NO_TEXT, SMALL, start
from PIL import Image
from runs import RECIPE, TWO, assert_same, wait_for_steps

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.folder import Splits
from cait.data.loader import TrainBatchSampler
from cait.data.reading import load_image
from cait.data.source import open_source
from cait.disk import file_lock, scratch
from cait.errors import OutageError, UserError
from contrib.shards import Shards, bucket
from contrib.shards.bucket import Bucket, Piece
from contrib.shards.source import ShardSource, Windowed


def module(root: Path | str, **settings: object) -> ImageNetDataModule:
    data = ImageNetDataModule(
        str(root), **(dict(img_size=32, batch_size=4, num_workers=0, repeats=1) | settings)
    )
    data.setup("fit")
    return data


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


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
    return make(
        digits_root,
        tmp_path_factory.mktemp("shards") / "digits",
        "--images",
        "100",
        "--workers",
        "2",
    )


@pytest.fixture(scope="module")
def digits_address(digit_shards: Path, s3: loopback.Requests) -> str:
    return loopback.upload(digit_shards, "digits")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("class_names", 9), 10**30),
        (("class_names",), 3),
        (("val", "table", 0), "\x1b]0;"),
        (("train", "chunks", 1, 0), 1e308),
        (("train", "chunks", 0, 0), None),
        (("train", "chunks"), {"a": 1}),
    ],
)
def test_an_index_of_other_values_is_no_index(
    path: tuple, value: object, digit_shards: Path, tmp_path: Path
) -> None:
    content = json.loads((digit_shards / "shards.json").read_text())
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (tmp_path / "shards.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"shards\.json is no index for this program"):
        _ = open_source(str(tmp_path)).index


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
    odd = Path(os.fsdecode(os.fsencode(mixed_root / "train/dog") + b"/" + NO_TEXT + b".png"))
    (mixed_root / "train/dog/2.png").rename(odd)
    out = make(mixed_root, tmp_path / "shards", "--images", "5", "--workers", "0")
    address = loopback.upload(out, "mixed")
    expected = module(mixed_root, max_bad_share=0.1)
    whole = [*expected.train_dataloader(), *expected.val_dataloader()]
    assert (
        module(f"{out.parent}/./{out.name}/", max_bad_share=0.1).state_dict()
        == expected.state_dict()
    )
    cache = dict(data_dir=str(tmp_path / "cache"))
    for root, settings in (
        (out, {}),
        (out, dict(num_workers=2)),
        (address, cache),
        (address, dict(num_workers=1)),
    ):
        data = module(root, max_bad_share=0.1, **(cache | settings))
        # All that a checkpoint compares: a run may go on from there.
        assert data.state_dict() == expected.state_dict()
        assert_equal_batches([*data.train_dataloader(), *data.val_dataloader()], whole)
        for ours, theirs in (
            (data.train_images, expected.train_images),
            (data.val_images, expected.val_images),
        ):
            for index in range(len(theirs)):
                path, label = theirs.samples[index]
                raw, our_label = ours.samples[index]
                assert (raw.getvalue(), our_label) == (Path(path).read_bytes(), label)
                assert ours.samples.name(index) == path.replace(str(mixed_root), str(root))
        assert {path.replace(str(root), "") for path in data.unreadable.seen} == (
            set() if settings.get("num_workers") else {"/train/cat/0.jpg", "/val/owl/5.JPEG"}
        )


def test_the_folder_that_one_is_in_gives_the_names_that_its_path_gives(
    digits_root: Path, digit_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(digits_root)
    out = make(Path(), tmp_path / "digits", "--images", "100", "--workers", "2")
    assert module(out).state_dict() == module(digit_shards).state_dict()


def test_litdata_reads_them_too(digit_shards: Path, digits_root: Path) -> None:
    from litdata import StreamingDataset

    theirs = StreamingDataset(str(digit_shards / "val"))
    ours = ShardSource(Splits(str(digit_shards)), Shards()).val
    assert len(theirs) == len(ours) == 360
    for index in (0, 99, 100, 359):
        data, label = theirs[index]
        assert (bytes(data), label) == (ours[index][0].getvalue(), ours[index][1])


@pytest.mark.parametrize("kind", ["cifar10", "16 bits"])
def test_images_that_are_decoded_already_keep_their_pixels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image]
) -> None:
    if kind == "cifar10":
        formats.write_cifar10(tmp_path / "cifar10", monkeypatch, photographs)
        root, more = "torch/cifar10", dict(data_dir=str(tmp_path / "cifar10"), val_split="test")
    else:
        (tmp_path / "deep_pictures.py").write_text(
            "import numpy as np\nfrom PIL import Image\n"
            "class Some:\n"
            "    classes = ['a', 'b']\n"
            "    def __init__(self, split): self.first = 8 * (split == 'val')\n"
            "    def __len__(self): return 8\n"
            "    def __getitem__(self, index):\n"
            "        index += self.first\n"
            "        image = Image.fromarray((600 * np.arange(96).reshape(8, 12) + index).astype(np.int32))\n"
            "        return image, -1 if index == 9 else index % 2\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        root, more = "deep_pictures:Some", {}
    options = [f"--{name}={value}" for name, value in more.items()]
    out = make(root, tmp_path / "shards", "--images=7", "--workers=0", *options)
    ours, theirs = module(out), module(root, **more)
    assert ours.state_dict() == theirs.state_dict()
    assert_equal_batches([*ours.train_dataloader(), *ours.val_dataloader()], batches(root, **more))
    for index in range(len(theirs.val_images)):
        raw, label = ours.val_images.samples[index]
        their_raw, their_label = theirs.val_images.samples[index]
        assert load_image(raw).tobytes() == load_image(their_raw).tobytes()
        assert label == their_label


# Making them


def kill_after(chunks: int, root: Path, out: Path, workers: int) -> None:
    """Make shards in a process of its own, and kill it once so many chunks are there."""
    process = get_context("fork").Process(
        target=make, args=(root, out, "--images=40", f"--workers={workers}")
    )
    process.start()
    end = time.monotonic() + LIMIT
    while len(list(out.glob("[tv]*/chunk-*.bin"))) < chunks:
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("kills", [(3,), pytest.param((1, 8, 15, 25, 40), marks=pytest.mark.slow)])
def test_a_making_that_is_killed_goes_on_to_the_same_files(
    kills: tuple[int, ...], digits_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "killed"
    for number, chunks in enumerate(kills):
        kill_after(chunks, digits_root, out, workers=number % 3)
        assert not (out / "shards.json").exists()
    with pytest.raises(UserError, match="give the same `cait shards` command again"):
        module(out)
    other = ["shards", str(digits_root), str(out), "--images=41"]
    assert "holds a part of other shards" in refusal(other, capsys)
    before = {path: path.stat().st_mtime_ns for path in out.glob("[tv]*/chunk-*.bin")}
    assert len(before) >= kills[-1]
    make(digits_root, out, "--images=40", "--workers=1")
    # what was made is not made again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert tree(out) == tree(make(digits_root, tmp_path / "whole", "--images=40", "--workers=2"))
    assert "is not an empty folder" in refusal(other, capsys)
    source = open_source(str(out))
    assert ([*source.verify()], len(source.train), len(source.val)) == ([], 1437, 360)


@pytest.mark.parametrize("kind", ["unreadable", "not empty", "no images", "no data"])
def test_what_cannot_be_made_is_told_in_a_line(
    kind: str, mixed_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options, root, words = tmp_path / "shards", ["--workers=1"], mixed_root, ""
    if kind == "unreadable":
        (mixed_root / "train/dog/2.png").unlink()
        (mixed_root / "train/dog/2.png").symlink_to("/nowhere/gone.png")
        words = f"cannot read the image {mixed_root}/train/dog/2.png: No such file or directory"
    elif kind == "not empty":
        out, words = mixed_root, f"{mixed_root} is not an empty folder"
    elif kind == "no images":
        options, words = ["--images=0"], "--images must be at least 1"
    else:
        root, words = tmp_path / "nowhere", f"the data folder {tmp_path}/nowhere does not exist"
    assert words in refusal(["shards", str(root), str(out), *options], capsys)


# What cannot be read


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def saved(**columns: list[int]) -> bytes:
    np.savez(file := BytesIO(), **columns)
    return file.getvalue()


def replace_table(out: Path, table: bytes) -> None:
    """Another table of the training images, with its right checksum."""
    (out / "train/images.npz").write_bytes(table)
    index = json.loads((out / "shards.json").read_text())
    index["train"]["table"] = [len(table), hashlib.sha256(table).hexdigest()]
    (out / "shards.json").write_text(json.dumps(index))


def inflating(size: int) -> bytes:
    """A table of so many bytes, packed."""
    file = BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("names.npy", "w") as part,
    ):
        for _ in range(size >> 24):
            part.write(bytes(1 << 24))
    return file.getvalue()


LONG = dict(names=[0], ends=[1], labels=[0], starts=[9], sizes=[1 << 40], places=[0])
FAR = dict(names=[0], ends=[1], labels=[0], starts=[0], sizes=[0], places=[10**6])
LOCAL: dict[str, tuple[Callable[[Path], object], dict, str]] = {
    "missing chunk": (
        lambda out: (out / "train/chunk-0-3.bin").unlink(),
        {},
        "cannot read {out}/train/chunk-0-3.bin",
    ),
    "torn chunk": (
        lambda out: os.truncate(out / "val/chunk-0-1.bin", 99),
        {},
        "{out}/val/chunk-0-1.bin is cut off",
    ),
    "damaged table": (
        lambda out: damage(out / "train/images.npz"),
        {},
        "{out}/train/images.npz is damaged",
    ),
    "no table": (
        lambda out: replace_table(out, b"PK\3\4"),
        {},
        "{out}/train/images.npz is no table of these shards",
    ),
    "table without labels": (
        lambda out: replace_table(out, saved(places=[0])),
        {},
        "images.npz is no table of these shards",
    ),
    "table of other chunks": (
        lambda out: replace_table(out, saved(**FAR)),
        {},
        "is no table of these shards",
    ),
    "table of images past the end of a chunk": (
        lambda out: replace_table(out, saved(**LONG)),
        {},
        "it names images past the end of their chunk",
    ),
    "table that inflates": (
        lambda out: replace_table(out, inflating(1 << 29)),
        {},
        "its content would take far more memory than the file",
    ),
    "no index": (
        lambda out: (out / "shards.json").write_text("[]"),
        {},
        "{out}/shards.json is no index",
    ),
    "newer": (
        lambda out: (out / "shards.json").write_text('{"version": 2}'),
        {},
        "is of version 2",
    ),
    "other split": (
        lambda out: None,
        dict(val_split="test"),
        "made of val: leave out --data.val_split test",
    ),
}


@pytest.mark.parametrize("kind", LOCAL)
def test_shards_that_are_not_whole_are_told(kind: str, digit_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    shutil.copytree(digit_shards, out)
    change, settings, words = LOCAL[kind]
    change(out)
    with pytest.raises(UserError) as told:
        module(out, **settings)
    assert words.format(out=out) in str(told.value)


def test_a_damaged_chunk_is_found_by_the_check(
    digit_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cait.extras.datacheck")
    out = tmp_path / "shards"
    shutil.copytree(digit_shards, out)
    main(["check", str(out), "--images", "20"])
    assert f"{out}/train: 15 chunk(s), checksums compared" in capsys.readouterr().out
    damage(out / "train/chunk-0-2.bin")
    with pytest.raises(SystemExit):
        main(["check", str(out)])
    assert f"wrong: {out}/train/chunk-0-2.bin is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("root", "environment", "words"),
    [
        ("s3://no-such-bucket/digits", {}, "(NoSuchBucket)"),
        (
            "s3://pictures/nothing",
            {},
            "cannot read s3://pictures/nothing/shards.json: An error occurred (NoSuchKey)",
        ),
        ("s3://pictures/digits", dict(AWS_ENDPOINT_URL="nonsense"), "Invalid endpoint: nonsense"),
        ("s3://pictures/digits", dict(AWS_ACCESS_KEY_ID=None), "Unable to locate credentials"),
        (
            "s3://pictures/digits",
            dict(boto3=None),
            "by boto3: .venv/bin/pip install --editable '.[stream]'",
        ),
        (
            "http://pictures/digits",
            {},
            "shards are read from a folder, s3://BUCKET/FOLDER or gs://",
        ),
    ],
)
def test_an_address_that_cannot_be_read_is_told_at_once(
    root: str,
    environment: dict[str, str | None],
    words: str,
    digits_address: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in environment.items():
        if name == "boto3":
            monkeypatch.setitem(sys.modules, "boto3", None)
        elif value is None:
            monkeypatch.delenv(name)
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.aws
        else:
            monkeypatch.setenv(name, value)
    bucket.client.cache_clear()
    try:
        with pytest.raises(UserError) as told:
            module(root, data_dir=str(tmp_path))
    finally:
        bucket.client.cache_clear()
    assert words in str(told.value)
    assert root in str(told.value)
    assert told.value.status == 2


def test_googles_buckets_are_read_in_the_language_of_s3(
    digits_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        len(module(digits_address.replace("s3://", "gs://"), data_dir=str(tmp_path)).source.train)
        == 1437
    )
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert (
        bucket.client(0, bucket.endpoint("gs")).meta.endpoint_url
        == "https://storage.googleapis.com"
    )
    assert "amazonaws.com" in bucket.client(0, bucket.endpoint("s3")).meta.endpoint_url


def test_a_table_that_is_damaged_in_the_cache_is_fetched_again(
    digits_address: str, tmp_path: Path
) -> None:
    module(digits_address, data_dir=str(tmp_path))
    (table,) = tmp_path.glob("*/train/images.npz")
    sound = table.read_bytes()
    damage(table)
    module(digits_address, data_dir=str(tmp_path))
    assert table.read_bytes() == sound


@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_chunk_that_is_not_whole_in_the_bucket_ends_the_run(
    kind: str, digit_shards: Path, tmp_path: Path, s3: loopback.Requests
) -> None:
    out, name = tmp_path / "shards", f"torn-{kind}"
    shutil.copytree(digit_shards, out)
    address, chunk = loopback.upload(out, name), f"{name}/train/chunk-0-2.bin"
    if kind == "missing":
        loopback.client().delete_object(Bucket=loopback.BUCKET, Key=chunk)
    else:
        damage(out / "train/chunk-0-2.bin")
        loopback.client().upload_file(str(out / "train/chunk-0-2.bin"), loopback.BUCKET, chunk)
    data = module(address, data_dir=str(tmp_path / "cache"), num_workers=1)
    words = "NoSuchKey" if kind == "missing" else "checksum"
    with pytest.raises(UserError, match=f"{address}/train/chunk-0-2.bin.*{words}") as told:
        list(data.train_dataloader())
    assert told.value.status == 2


# Whole runs

BRIEF = [
    *SMALL,
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=6",
    "--trainer.limit_val_batches=2",
]
BRIEF += ["--trainer.log_every_n_steps=1", "--model.drop_path_rate=0.2", "--ema.decay=0.9"]


def test_a_run_on_s3_ends_with_the_bits_of_the_folder_whatever_fails_and_can_be_used(
    digits_root: Path,
    digits_address: str,
    s3: loopback.Requests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(bucket, "PAUSES", (0.01, 0.1))
    main(["fit", *BRIEF, "--run_name=folder", f"--data.root={digits_root}"])
    from_s3 = ["fit", *BRIEF, "--run_name=s3", f"--data.root={digits_address}"]
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "PATIENCE", 1.0)
        s3.fail("error", LIMIT)
        with pytest.raises(SystemExit) as stop:
            main(from_s3)
    assert stop.value.code == 75  # for a scheduler to try again
    said = capfd.readouterr().err
    assert f"cait: error: cannot read {digits_address}/shards.json: An error occurred (500)" in said
    assert "; it is tried again for 10 minutes" not in said
    s3.fail("cut", 1)
    main(from_s3)
    assert "it is tried again for 10 minutes" in capfd.readouterr().err
    logs = tmp_path / "logs"
    assert_same(logs / "s3", logs / "folder")
    main(["eval", "s3"])
    scores = json.loads((logs / "s3/evaluation.json").read_text())
    # not the two batches of training
    assert (scores["root"], scores["raw"]["images"]) == (
        digits_address,
        360,
    )
    main(["replay", "s3", "--step=3", "--data-only"])
    assert f"{digits_address}/train/" in (logs / "s3/replay/step-000003.csv").read_text()


def test_an_outage_in_a_worker_is_waited_out_or_ends_the_run_for_a_scheduler_to_try_again(
    digits_address: str, s3: loopback.Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "PAUSES", (0.01, 0.1))
    for kind in ("error", "cut"):
        data = module(digits_address, data_dir=str(tmp_path / kind), num_workers=1)
        s3.fail(kind, 1)
        assert len(next(iter(data.train_dataloader()))[1]) == 4
    data = module(digits_address, data_dir=str(tmp_path / "out"), num_workers=1)
    monkeypatch.setattr(bucket, "PATIENCE", 0.5)
    s3.fail("cut", LIMIT)
    with pytest.raises(
        OutageError, match=r"cannot read s3://pictures/digits/train/chunk-0-\d+\.bin: "
    ):
        list(data.train_dataloader())
    s3.fail("", 0)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["one", "two"])
@pytest.mark.parametrize("where", ["shards", "s3"])
def test_a_run_on_shards_that_is_killed_three_times_ends_as_on_the_folder(
    where: str,
    devices: str,
    digits_root: Path,
    digit_shards: Path,
    digits_address: str,
    s3: loopback.Requests,
    tmp_path: Path,
) -> None:
    recipe = [*RECIPE, *(TWO if devices == "two" else []), "--data.num_workers=2"]
    whole = start(tmp_path, "fit", *recipe, "--run_name=whole", f"--data.root={digits_root}")
    output = whole.communicate()[0]
    assert whole.returncode == 0, output
    root, run = (str(digit_shards) if where == "shards" else digits_address), tmp_path / "logs/cut"
    job = start(tmp_path, "fit", *recipe, "--run_name=cut", f"--data.root={root}")
    for steps, failure in ((8, "cut"), (25, "error"), (45, "")):
        wait_for_steps(run, steps - 4, job)
        s3.fail(failure, 60)
        wait_for_steps(run, steps, job)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        # The last part goes on from the folder.
        job = start(
            tmp_path, "resume", "cut", *([f"--data.root={digits_root}"] if steps == 45 else [])
        )
    output = job.communicate()[0]
    assert job.returncode == 0, output
    assert_same(run, tmp_path / "logs/whole")


# The cache


def pieces(folder: Path, count: int, size: int) -> list[Piece]:
    found = []
    for number in range(count):
        path = folder / f"train/chunk-0-{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data := bytes([number]) * size)
        found.append(Piece(f"train/{path.name}", size, hashlib.sha256(data).hexdigest()))
    return found


def held(cache: Path) -> int:
    """Bytes of the files in a cache."""
    with file_lock(cache / ".lock"):  # nothing is written or removed meanwhile
        return sum(
            path.stat().st_size for path in cache.glob("*/*/*chunk*") if path.suffix != ".lock"
        )


def read_at_random(address: str, cache: Path, limit: int, listed: list[Piece], seed: int) -> None:
    place = Bucket(address, cache, limit)
    place.folder = cache / "some"
    for number in np.random.default_rng(seed).integers(0, len(listed), 60).tolist():
        assert place.read(listed[number], 17, 5) == bytes([number]) * 5
        assert held(cache) <= limit


def test_the_cache_stays_within_its_bound_whoever_shares_it(
    tmp_path: Path, s3: loopback.Requests
) -> None:
    listed = pieces(tmp_path / "shards", 12, 10_000)
    address, cache = loopback.upload(tmp_path / "shards", "some"), tmp_path / "cache"
    stale = scratch(cache / "some/train/chunk-0-3.bin")  # of a process that was killed
    stale.parent.mkdir(parents=True)
    stale.write_bytes(bytes(10_000))
    children = [
        get_context("fork").Process(
            target=read_at_random, args=(address, cache, 45_000, listed, seed)
        )
        for seed in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(LIMIT)
        assert child.exitcode == 0
    assert not stale.exists()
    assert 30_000 < held(cache) <= 45_000


def test_a_chunk_is_fetched_once_and_the_one_used_longest_ago_goes(
    tmp_path: Path, s3: loopback.Requests
) -> None:
    listed = pieces(tmp_path / "shards", 5, 1000)
    place = Bucket(loopback.upload(tmp_path / "shards", "few"), tmp_path / "cache", 3000)
    place.folder = tmp_path / "cache/few"
    s3.paths.clear()
    for number in (0, 1, 2, 0, 1, 0, 3):
        place.read(listed[number], 0, 10)
        time.sleep(0.01)  # a file system's clock is coarse
    assert s3.of("/few/") == 4
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.bin")) == [
        f"chunk-0-{n}.bin" for n in (0, 1, 3)
    ]
    os.truncate(tmp_path / "cache/few/train/chunk-0-3.bin", 10)
    assert place.read(listed[3], 500, 3) == b"\x03\x03\x03"
    # Several processes want one chunk at once: one fetches it.
    s3.paths.clear()
    children = [
        get_context("fork").Process(target=place.read, args=(listed[4], 0, 10)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(LIMIT)
        assert child.exitcode == 0
    assert s3.of("/few/") == 1


# room for a third
@pytest.mark.parametrize("settings", [{}, dict(cache_gb=9e-5, order="windowed", window=3)])
def test_a_chunk_is_requested_once_in_an_epoch(
    settings: dict, digits_address: str, tmp_path: Path, s3: loopback.Requests
) -> None:
    data = module(digits_address, batch_size=16, data_dir=str(tmp_path), **settings)
    s3.paths.clear()
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 16 * 89
    assert s3.of("/train/chunk") == 15


# The windowed order


def sampled(
    epoch: int = 0, length: int = 1000, window: int = 4, **settings: int
) -> list[tuple[int, int, int]]:
    sampler = TrainBatchSampler(
        length, 10, seed=3, order=Windowed(torch.arange(length) % 20, window), **settings
    )
    sampler.epoch = epoch
    return [key for batch in sampler for key in batch]


def test_the_windowed_order_has_every_image_once_and_few_chunks_at_a_time() -> None:
    order = [index for _, index, _ in sampled()]
    assert sorted(order) == list(range(1000))
    assert order == [index for _, index, _ in sampled()]
    assert order != [index for _, index, _ in sampled(epoch=1)]
    chunks = [index % 20 for index in order]
    places = {
        chunk: [place for place, other in enumerate(chunks) if other == chunk]
        for chunk in range(20)
    }
    open_at = [
        sum(found[0] <= place <= found[-1] for found in places.values()) for place in range(1000)
    ]
    assert max(open_at) <= 4
    assert min(open_at[100:-100]) >= 3
    # Within them it is random: neighbors are of one chunk as rarely as four chunks allow.
    assert 0.15 < np.mean([a == b for a, b in pairwise(chunks[200:800])]) < 0.35


def test_ranks_repeats_and_a_resume_share_out_the_windowed_order() -> None:
    whole = sampled(repeats=3)
    assert [repeat for _, _, repeat in whole[:6]] == [0, 1, 2, 0, 1, 2]
    assert [index for _, index, _ in whole[::3]] == [index for _, index, _ in sampled()][
        : len(whole[::3])
    ]
    ranks = [sampled(repeats=3, rank=rank, world_size=2) for rank in range(2)]
    together = [key for pair in zip(*ranks, strict=True) for key in pair]
    assert together == whole[: len(together)]
    sampler = TrainBatchSampler(1000, 10, seed=3, order=Windowed(torch.arange(1000) % 20, 4))
    sampler.first_batch = 7
    assert [index for batch in sampler for _, index, _ in batch] == [
        index for _, index, _ in sampled()
    ][70:]


def test_the_order_is_refused_where_it_cannot_be_and_compared_on_resume(
    digits_root: Path, digit_shards: Path, digits_address: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"--data.order windowed is for shards, .* is none"):
        module(digits_root, order="windowed")
    with pytest.raises(
        UserError, match=r"9 chunks of s3://pictures/digits have .* raise --data.cache_gb or lower"
    ):
        module(digits_address, order="windowed", cache_gb=5e-5, data_dir=str(tmp_path))
    with pytest.raises(
        UserError, match=r"the chunks of s3://pictures/digits have .* or give --data.order windowed"
    ):
        module(digits_address, cache_gb=5e-5, data_dir=str(tmp_path))
    with pytest.raises(
        UserError, match=r"a chunk of s3://pictures/digits has .* raise --data.cache_gb"
    ):
        module(digits_address, cache_gb=1e-6, data_dir=str(tmp_path))
    with pytest.raises(UserError, match="window must be at least 1"):
        module(digit_shards, order="windowed", window=0)
    windowed = module(digit_shards, order="windowed").state_dict()
    assert windowed == module(digits_address, order="windowed", data_dir=str(tmp_path)).state_dict()
    other = module(digit_shards, order="windowed", window=7)
    state = dict(
        training=True, global_rank=0, world_size=1, accumulate_grad_batches=1, callbacks=[]
    )
    other.trainer = SimpleNamespace(**state)
    with pytest.raises(UserError, match="order of the images was windowed over 8 of the chunks"):
        other.load_state_dict(windowed)

"""Shards in a bucket, on a server of this machine: whole runs, outages, and the cache that processes share."""

import hashlib
import os
import signal
import time
from multiprocessing import get_context

import loopback
import numpy as np
import pytest
from harness import LIMIT, ended, over_table, parsed, start, works
from runs import RECIPE, TWO, assert_same, wait_for_steps
from shard_sets import module

from cait.disk import file_lock, scratch
from cait.errors import OutageError, UserError
from contrib.shards import bucket
from contrib.shards.bucket import Bucket, Piece


@over_table(__file__, "addresses")
def test_an_address_where_nothing_is_is_told_at_once(root, error, s3, tmp_path):
    with pytest.raises(UserError, match=rf"{root}/shards.json: .*\({error}\)") as raised:
        module(root, data_dir=str(tmp_path))
    assert raised.value.status == 2


def test_googles_buckets_are_read_in_the_language_of_s3(digits_address, tmp_path, monkeypatch):
    data = module(digits_address.replace("s3://", "gs://"), data_dir=str(tmp_path))
    assert len(data.source.train) == 1437
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert bucket.endpoint("gs") == "https://storage.googleapis.com"
    assert bucket.endpoint("s3") is None  # Amazon's


def test_a_table_that_is_damaged_in_the_cache_is_fetched_again(digits_address, tmp_path):
    module(digits_address, data_dir=str(tmp_path))
    (table,) = tmp_path.glob("*/train/images.npz")
    content = table.read_bytes()
    table.write_bytes(content[:-1] + b"x")
    module(digits_address, data_dir=str(tmp_path))
    assert table.read_bytes() == content


@pytest.mark.parametrize("problem", ["checksum", "NoSuchKey"])
def test_a_chunk_that_is_not_whole_in_the_bucket_ends_the_run(problem, digit_shards, tmp_path, s3):
    address = loopback.upload(digit_shards, problem)
    chunk = dict(Bucket=loopback.BUCKET, Key=f"{problem}/train/chunk-0-2.bin")
    loopback.client().delete_object(**chunk)
    if problem == "checksum":
        loopback.client().put_object(**chunk, Body=b"cut off")
    data = module(address, data_dir=str(tmp_path), num_workers=1)
    with pytest.raises(UserError, match=rf"{address}/train/chunk-0-2\.bin.*{problem}") as raised:
        list(data.train_dataloader())
    assert raised.value.status == 2


@over_table(__file__, "caches")
def test_a_cache_that_is_too_small_is_refused(settings, remedy, digits_address, tmp_path):
    with pytest.raises(UserError, match=remedy):
        module(digits_address, data_dir=str(tmp_path), **settings)


# Whole runs


def test_a_run_on_s3_ends_with_the_bits_of_the_folder_whatever_fails_and_can_be_used(
    trained, digits_address, s3, cait, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket, "PAUSES", (0.01, 0.1))
    words = f"fit --config={trained}/config.yaml --trainer.default_root_dir=logs --run_name=s3"
    fit = [*words.split(), f"--data.root={digits_address}"]
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "PATIENCE", 1.0)
        s3.fail("error")
        out = cait(*fit)
    assert out.returncode == 75  # for a scheduler to try again
    assert f"error: cannot read {digits_address}/shards.json: " in out.stderr
    s3.fail("cut", 3)
    assert "it is tried again for 10 minutes" in cait(*fit).stderr
    run = tmp_path / "logs/s3"
    assert_same(run, trained)
    works(cait("eval", "s3"))
    scores = parsed(run / "evaluation.json")
    assert (scores["root"], scores["raw"]["images"]) == (digits_address, 360)
    works(cait("replay", "s3", "--step=3", "--data-only"))
    assert f"{digits_address}/train/" in (run / "replay/step-000003.csv").read_text()


@pytest.mark.parametrize("failure", ["error", "cut"])
def test_an_outage_in_a_worker_is_waited_out_or_ends_the_run_for_a_scheduler_to_try_again(
    failure, digits_address, s3, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket, "PAUSES", (0.01, 0.1))
    data = module(digits_address, data_dir=str(tmp_path), num_workers=1)
    s3.fail(failure, 3)
    assert len(next(iter(data.train_dataloader()))[1]) == 4
    monkeypatch.setattr(bucket, "PATIENCE", 0.5)
    s3.fail(failure)
    with pytest.raises(OutageError, match=rf"{digits_address}/train/chunk-0-\d+\.bin: "):
        list(data.train_dataloader())
    s3.fail(failure, 0)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [[], TWO], ids=["one", "two"])
@pytest.mark.parametrize("where", ["digit_shards", "digits_address"])
def test_a_run_on_shards_that_is_killed_three_times_goes_on_and_ends_as_on_the_folder(
    where, devices, s3, cait, tmp_path, request
):
    recipe = [*RECIPE, *devices, "--data.num_workers=2"]
    whole = ended(tmp_path, "whole", recipe)
    run = tmp_path / "logs/cut"
    words = ["fit", *recipe, "--run_name=cut", f"--data.root={request.getfixturevalue(where)}"]
    for steps, failure in ((4, "cut"), (21, "error"), (41, "")):
        job = start(tmp_path, *words)
        wait_for_steps(run, steps, job)
        s3.fail(failure, 8)
        wait_for_steps(run, steps + 4, job)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        words = ["resume", "cut"]
    works(cait("resume", "cut", "--data.root=data/digits"))
    assert_same(run, whole)


# The cache


@pytest.fixture
def pieces(tmp_path, s3):
    """Twelve chunks of 10,000 bytes, whose bytes are their numbers, in the bucket."""
    pieces = []
    for number in range(12):
        name = f"train/chunk-0-{number}.bin"
        content = bytes([number]) * 10_000
        loopback.client().put_object(Bucket=loopback.BUCKET, Key=f"some/{name}", Body=content)
        pieces.append(Piece(name, len(content), hashlib.sha256(content).hexdigest()))
    return pieces


def cache_in(folder, limit):
    cache = Bucket(f"s3://{loopback.BUCKET}/some", folder, limit)
    cache.folder = folder / "some"
    return cache


def size(folder):
    """Bytes of the chunks in a cache."""
    with file_lock(folder / ".lock"):  # nothing is written or removed meanwhile
        files = [path for path in folder.glob("*/*/*chunk*") if path.suffix != ".lock"]
        return sum(path.stat().st_size for path in files)


def in_three_processes(function, *arguments):
    with get_context("fork").Pool(3) as pool:
        pool.starmap_async(function, [(*arguments, number) for number in range(3)]).get(LIMIT)


def read_at_random(pieces, folder, seed):
    cache = cache_in(folder, 45_000)
    for number in np.random.default_rng(seed).integers(0, len(pieces), 30).tolist():
        assert cache.read(pieces[number], 17, 5) == bytes([number]) * 5
        assert size(folder) <= 45_000


def test_the_cache_stays_within_its_bound_whoever_shares_it(tmp_path, pieces):
    stale = scratch(tmp_path / "some/train/chunk-0-3.bin")  # of a process that was killed
    stale.parent.mkdir(parents=True)
    stale.write_bytes(bytes(10_000))
    in_three_processes(read_at_random, pieces, tmp_path)
    assert not stale.exists()
    assert 30_000 < size(tmp_path) <= 45_000


def test_a_chunk_is_fetched_once_and_the_one_used_longest_ago_goes(tmp_path, pieces, s3):
    cache = cache_in(tmp_path, 30_000)
    s3.paths.clear()
    for number in (0, 1, 2, 0, 1, 0, 3):
        cache.read(pieces[number], 0, 10)
        time.sleep(0.01)  # a file system's clock is coarse
    assert s3.count("/some/") == 4
    kept = sorted(path.name for path in tmp_path.rglob("*.bin"))
    assert kept == ["chunk-0-0.bin", "chunk-0-1.bin", "chunk-0-3.bin"]
    os.truncate(tmp_path / "some/train/chunk-0-3.bin", 10)
    assert cache.read(pieces[3], 500, 3) == b"\x03\x03\x03"
    s3.paths.clear()
    in_three_processes(cache.read, pieces[4], 0)
    assert s3.count("/some/") == 1


@over_table(__file__, "orders")
def test_a_chunk_is_requested_once_in_an_epoch(settings, digits_address, tmp_path, s3):
    data = module(digits_address, batch_size=16, data_dir=str(tmp_path), **settings)
    s3.paths.clear()
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 16 * 89
    assert s3.count("/train/chunk") == 15

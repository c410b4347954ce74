"""Shards of the digits, on a disk and in a bucket."""

import loopback
import pytest
from shard_sets import make


@pytest.fixture(scope="module")
def s3():
    with loopback.server() as requests:
        yield requests


@pytest.fixture(scope="module")
def digit_shards(digits_root, tmp_path_factory):
    """15 chunks to train on, 4 to validate on."""
    shards = tmp_path_factory.mktemp("shards") / "digits"
    return make(digits_root, shards, "--images=100", "--workers=2")


@pytest.fixture(scope="module")
def digits_address(digit_shards, s3):
    return loopback.upload(digit_shards, "digits")

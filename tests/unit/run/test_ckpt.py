"""What a checkpoint holds; and a small file that stands for gigabytes is refused before it takes the memory."""

import codecs
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same import same

from cait import ckpt, plain
from cait.errors import UserError
from cait.model.network import NetworkSettings, at_most
from cait.settings import group

LIMIT = 1 << 20
"""Bytes that a small file may stand for here."""


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(plain, "FLOOR", LIMIT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.ckpt"


def write(path, content, **options):
    """A checkpoint whose callback holds this."""
    checkpoint = {"state_dict": {}, "global_step": 1, "callbacks": {"own": content}}
    torch.save(checkpoint, path, **options)


def refused(path):
    with pytest.raises(UserError, match=r"x\.ckpt cannot be used"):
        ckpt.read_checkpoint(path)


class Call:
    """In a pickle, the call of a function; and then the state that what it returns gets."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None):
        self.parts = (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def again_and_again(*parts, **state):
    """Each call has the same arguments, which the file holds once."""
    return [Call(*parts, **state) for _ in range(2000)]


LETTERS = "".join(map(chr, range(0x100, 0x500)))
NUMBERS = dict.fromkeys(range(1000))
CALLS: dict[str, Any] = {
    "a number of bytes": Call(bytearray, 1 << 30),
    "bytes in another encoding": Call(codecs.encode, LETTERS, "punycode"),
    "bytes": again_and_again(codecs.encode, "a" * 1000, "latin1"),
    "sets": again_and_again(set, LETTERS),
    "counters": again_and_again(Counter, LETTERS),
    "dictionaries": again_and_again(OrderedDict, NUMBERS),
    "states": again_and_again(OrderedDict, state=dict.fromkeys(map(str, NUMBERS))),
    "a tensor of so many values": Call(torch.FloatTensor, 1 << 30),
    "a storage of so many bytes": Call(torch.UntypedStorage, 1 << 30),
}
"""Calls that torch allows."""


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_a_pickle_are_bounded(name, path):
    write(path, CALLS[name])
    refused(path)


NUMBER = torch.zeros(1)
TENSORS: dict[str, Callable[[], Any]] = {
    "strides of 0": lambda: NUMBER.expand(1000, 1000),
    "strides that overlap": lambda: torch.zeros(2000).as_strided((1000, 1000), (1, 1)),
    "a little, many times": lambda: [NUMBER.expand(90_000) for _ in range(100)],
    "of a parameter": lambda: torch.nn.Parameter(NUMBER.expand(1000, 1000)),
}


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_claims_no_more_than_it_holds(name, zipped, path):
    write(path, TENSORS[name](), _use_new_zipfile_serialization=zipped)
    refused(path)


@pytest.mark.usefixtures("small_limit")
def test_a_part_does_not_inflate(path, tmp_path):
    write(tmp_path / "plain", "a" * 2 * LIMIT)
    with (
        zipfile.ZipFile(tmp_path / "plain") as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert path.stat().st_size < LIMIT / 100
    refused(path)


@pytest.mark.usefixtures("small_limit")
def test_parts_do_not_lie_over_each_other(path):
    write(path, "a" * 200_000)
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist += archive.filelist * 40
        archive._didModify = True  # type: ignore[attr-defined]
    refused(path)


@pytest.mark.usefixtures("small_limit")
def test_what_a_run_saves_is_read_as_it_was(path):
    """Among it what pickle writes by a call: bytes, sets, tied weights."""
    weight = torch.randn(300, 300)
    state = {"a.weight": weight, "b.weight": weight, "c.weight": weight.T}
    kept = {
        "bytes": b"\x00\xff" * 100,
        "bytearray": bytearray(b"abc"),
        "nothing": bytearray(),
        "number": 1 + 2j,
        "half": weight.half(),
    }
    repeated = {"repeated": torch.zeros(1).expand(1000)}
    made_plain = {"order": OrderedDict(a=1), "names": {"a"}, "size": weight.shape}
    own = kept | made_plain | repeated
    content = {"state_dict": state, "global_step": 1, "callbacks": {"own": own}}
    torch.save(content, path)
    checkpoint = ckpt.read_checkpoint(path)
    assert all(torch.equal(checkpoint["state_dict"][key], value) for key, value in state.items())
    own = checkpoint["callbacks"]["own"]
    assert torch.equal(own.pop("repeated"), torch.zeros(1000))
    plain_values = {"order": {"a": 1}, "names": ["a"], "size": [300, 300]}
    assert same(own, kept | plain_values)


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.empty(1 << 40, device="meta")},
        {"b": torch.zeros(2, 2).to_sparse().sparse_resize_((1 << 20, 1 << 20), 2, 0)},
    ],
    ids=["without values", "sparse"],
)
def test_a_tensor_without_values_allows_no_larger_network(state):
    settings = {"name": "timm/vit_tiny_patch16_224", "img_size": 1 << 14, "num_classes": 10}
    with pytest.raises(UserError, match="far larger than its weights"), at_most(state, settings):
        group(NetworkSettings, settings)


def test_the_data_modules_part_is_found_by_what_it_holds():
    state = {"class_names": ["cat", "dog"], "depends_on": {"seed": 0}}
    rest = {
        "state_dict": {},
        "callbacks": {"EMA": {}, "StepSeed": {}},
        "hyper_parameters": {"class_names": ["of the module"]},
    }
    checkpoint = rest | {"test_run.<locals>.MyData": state}
    assert ckpt.data_state(checkpoint) is state
    assert ckpt.class_names(checkpoint) == ["cat", "dog"]
    ckpt.rename_data_state(checkpoint, "OtherData")
    assert checkpoint == rest | {"OtherData": state}


def damage(path, position=5000):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


@pytest.fixture
def saved(path):
    weights = {"weights": torch.randn(10_000)}
    torch.save(weights, path)
    assert ckpt.is_whole(path)
    return weights


@pytest.mark.usefixtures("saved")
def test_torch_saves_checksums_by_which_damage_is_seen(path):
    damage(path)
    assert not ckpt.is_whole(path)


@pytest.mark.usefixtures("saved")
def test_a_file_that_is_cut_off_is_not_whole(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert not ckpt.is_whole(path)


@pytest.mark.usefixtures("saved")
def test_a_checkpoint_that_took_anothers_place_is_checked_anew(path, tmp_path):
    """A copy from elsewhere may have the size and the time of the file that it replaces, as rsync keeps them."""
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(path.read_bytes())
    damage(copy)
    status = path.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)
    assert not ckpt.is_whole(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the maps")
def test_a_checkpoint_takes_no_memory_before_its_weights_are_used(saved, path):
    content = ckpt.read(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert same(content, saved)

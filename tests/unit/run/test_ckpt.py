"""What a checkpoint holds, and whether it is whole. What is refused is in tests/cli/golden/checkpoint.yaml."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from same import same

from cait import ckpt, plain


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.ckpt"


def test_what_a_run_saves_is_read_as_it_was(path, monkeypatch):
    """Among it what pickle writes by a call: bytes, sets, tied weights."""
    monkeypatch.setattr(plain, "FLOOR", 1 << 20)
    weight = torch.randn(300, 300)
    state = {"a.weight": weight, "b.weight": weight, "c.weight": weight.T}
    own = {
        "bytes": b"\x00\xff" * 100,
        "bytearray": bytearray(b"abc"),
        "nothing": bytearray(),
        "number": 1 + 2j,
        "half": weight.half(),
        "repeated": torch.zeros(2, 1).expand(2, 500),
    }
    others = {"order": OrderedDict(a=1), "names": {"a"}, "size": weight.shape}
    content = {"state_dict": state, "global_step": 1, "callbacks": {"own": own | others}}
    torch.save(content, path)
    made_plain = {"order": {"a": 1}, "names": ["a"], "size": [300, 300]}
    content["callbacks"] = {"own": own | made_plain}
    assert same(ckpt.read_checkpoint(path), content)


def test_the_data_modules_part_is_found_by_what_it_holds():
    state = {"class_names": ["cat", "dog"], "depends_on": {"seed": 0}}
    rest = {"callbacks": {"EMA": {}}, "hyper_parameters": {"class_names": ["of the module"]}}
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

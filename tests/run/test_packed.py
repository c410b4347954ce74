"""A small file that stands for gigabytes: it is refused before it takes the memory."""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cait import ckpt, plain
from cait.errors import UserError
from cait.model.network import NetworkSettings, at_most
from cait.settings import group

LIMIT = 1 << 20
"""Bytes that a small file may stand for here."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "FLOOR", LIMIT)


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def name(path: str) -> bytes:
    module, _, attribute = path.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


LETTERS = text("".join(map(chr, range(0x100, 0x500))))
MANY = 2000
COPIES = b"h\x00h\x01\x85R" * MANY
PICKLES: dict[str, bytes] = {
    "a number of bytes": name("builtins.bytearray") + number(1 << 30) + b"\x85R",
    "bytes in another encoding": name("_codecs.encode") + LETTERS + text("punycode") + b"\x86R",
    "bytes again and again": b"]("
    + name("_codecs.encode")
    + b"q\x00"
    + text("a" * 1000)
    + b"q\x01"
    + (b"h\x00h\x01" + text("latin1") + b"\x86R") * MANY
    + b"e",
    **{
        f"copies by {called}": b"](" + name(called) + b"q\x00" + LETTERS + b"q\x01" + COPIES + b"e"
        for called in ("builtins.set", "collections.Counter")
    },
    "copies of a dictionary": b"]("
    + name("collections.OrderedDict")
    + b"q\x00}("
    + b"".join(number(key) + b"N" for key in range(1000))
    + b"uq\x01"
    + COPIES
    + b"e",
    "a state set again and again": name("collections.OrderedDict")
    + b")R}("
    + b"".join(text(str(key)) + b"N" for key in range(1000))
    + b"uq\x01b"
    + b"h\x01b" * MANY,
    "a tensor of so many values": name("torch.FloatTensor") + number(1 << 30) + b"\x85R",
    "a storage of so many bytes": name("torch.storage.UntypedStorage") + number(1 << 30) + b"\x85R",
}
"""Pickles that call what torch allows."""


def with_pickle(path: Path, content: bytes, how: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch's with another pickle in it."""
    torch.save({"state_dict": {}, "global_step": 1}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for part, data in parts.items():
            archive.writestr(part, content if part.endswith("data.pkl") else data)
    return path


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_pickle_is_read_within_bounds(content: bytes, tmp_path: Path) -> None:
    path = with_pickle(tmp_path / "x.ckpt", b"\x80\x02" + content + b".")
    with pytest.raises(UserError, match=r"x\.ckpt cannot be used: its content .* far more memory"):
        ckpt.read_checkpoint(path)


ONE = torch.zeros(1)
STATES: dict[str, Callable[[], Any]] = {
    "strides of 0": lambda: torch.zeros(1).expand(1000, 1000),
    "strides that overlap": lambda: torch.zeros(2000).as_strided((1000, 1000), (1, 1)),
    "a little, many times": lambda: [ONE.expand(90_000) for _ in range(100)],
    "of a parameter": lambda: torch.nn.Parameter(torch.zeros(1).expand(1000, 1000)),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_claims_no_more_than_it_holds(
    make: Callable[[], Any], zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    content = {"state_dict": {}, "global_step": 1, "callbacks": {"own": make()}}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="far more memory"):
        ckpt.read_checkpoint(path)


def test_a_part_does_not_inflate(tmp_path: Path) -> None:
    content = b"\x80\x02" + text("a" * 2 * LIMIT) + b"."
    path = with_pickle(tmp_path / "x.ckpt", content, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < LIMIT / 100
    with pytest.raises(UserError, match="far more memory"):
        ckpt.read_checkpoint(path)


def test_parts_do_not_lie_over_each_other(tmp_path: Path) -> None:
    path = with_pickle(tmp_path / "x.ckpt", b"\x80\x02" + text("a" * 200_000) + b".")
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist += archive.filelist * 40
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="far more memory"):
        ckpt.read_checkpoint(path)


def test_what_a_run_saves_is_read_as_before(tmp_path: Path) -> None:
    """Among it what pickle writes by a call: bytes, sets, tied weights."""
    weight = torch.randn(300, 300)
    own = {
        "bytes": b"\x00\xff" * 100,
        "bytearray": bytearray(b"abc"),
        "nothing": bytearray(),
        "order": OrderedDict(a=1),
        "names": {"a", "b"},
        "size": weight.shape,
        "number": 1 + 2j,
        "half": weight.half(),
        "repeated": torch.zeros(1).expand(1000),
    }
    state = {"a.weight": weight, "b.weight": weight, "c.weight": weight.T}
    torch.save({"state_dict": state, "global_step": 1, "callbacks": {"own": own}}, tmp_path / "x")
    read = ckpt.read_checkpoint(tmp_path / "x")
    assert all(torch.equal(read["state_dict"][key], value) for key, value in state.items())
    kept = torch.load(tmp_path / "x", weights_only=True)["callbacks"]["own"]
    assert pickle.dumps(kept["bytes"]) == pickle.dumps(own["bytes"])
    with torch.serialization.safe_globals([]):
        assert read["callbacks"]["own"]["bytes"] == own["bytes"]
    assert read["callbacks"]["own"]["bytearray"] == own["bytearray"]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "xxs24", "img_size": 1 << 18, "fields": {"depth": 1}},
        {"name": "timm/vit_tiny_patch16_224", "img_size": 1 << 16},
        {"name": "timm/vit_tiny_patch16_224", "img_size": 2048, "fields": {"patch_size": 1}},
    ],
)
def test_a_network_is_counted_before_it_takes_memory(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: object) -> None:
        raise AssertionError("it was built with values")

    with (
        pytest.raises(UserError, match="far larger than its weights"),
        at_most({"w": torch.zeros(9)}, settings | {"num_classes": 10}),
    ):
        built()


def test_a_tensor_without_values_allows_no_larger_network() -> None:
    claims = torch.empty(1 << 40, device="meta")
    sparse = torch.zeros(2, 2).to_sparse().sparse_resize_((1 << 20, 1 << 20), 2, 0)
    settings = {"name": "xxs24", "img_size": 1 << 14, "num_classes": 10}
    with (
        pytest.raises(UserError, match="far larger than its weights"),
        at_most({"a": claims, "b": sparse}, settings),
    ):
        group(NetworkSettings, settings)

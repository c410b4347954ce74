"""Checkpoints that all processes write together: a folder, where each process saves the parts it holds.

The folder holds what a plain checkpoint does, key by key:

- `__0_0.distcp`, `__1_0.distcp`, ... and `.metadata`: the sharded tensors, by torch.distributed.checkpoint;
- `rest.pt`: everything else, with None where a sharded tensor goes;
- `checksums.json`: size and CRC-32 of each of these files. It is written last.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor

from cait import disk

REST = "rest.pt"
CHECKSUMS = "checksums.json"
METADATA = ".metadata"

Place = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: keys of dictionaries and places in lists, from the top."""

_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    """The folder may be a stranger's, and a pickle is code: read nothing but descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # the module depends on Python's version
            return PurePosixPath
        known = (module, name) in _METADATA_NAMES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no description of a tensor")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if any(Path(info.relative_path).name != info.relative_path for info in metadata.storage_data.values()):
            raise pickle.UnpicklingError("a tensor lies outside of the folder")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read(folder: Path, mesh: DeviceMesh | None = None, without: Sequence[str] = ()) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    Args:
        folder: of the checkpoint.
        mesh: the processes that share the tensors now; each reads only its own part. Another number of processes may
            have written the folder. None reads the tensors whole.
        without: keys of the checkpoint whose sharded tensors are left out; None takes their place.
    """
    content = torch.load(folder / REST, map_location="cpu", weights_only=True)
    checkpoint, places = content["checkpoint"], content["places"]
    reader = _Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    wanted = {key: place for key, place in places.items() if place[0] not in without}
    tensors = {key: _empty(known[key], mesh) for key in wanted}
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    for key, place in wanted.items():
        _at(checkpoint, place[:-1])[place[-1]] = tensors[key]
    return checkpoint


def _empty(described: Any, mesh: DeviceMesh | None) -> Tensor:
    if not isinstance(described, TensorStorageMetadata):  # torch would read anything else as a pickle, which is code
        raise pickle.UnpicklingError("a checkpoint's folder holds tensors alone")
    size, dtype = described.size, described.properties.dtype
    if mesh is None:
        return torch.empty(size, dtype=dtype)
    return empty_dtensor(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def _at(checkpoint: Any, place: Place) -> Any:
    for key in place:
        checkpoint = checkpoint[key]
    return checkpoint


def share_out(
    checkpoint: dict[str, Any], mesh: DeviceMesh, is_sharded: Callable[[Place, Tensor], bool]
) -> dict[str, Any]:
    """A plain checkpoint in which each process keeps only its part of the sharded tensors."""

    def distributed(place: Place, tensor: Tensor) -> Tensor:
        if not is_sharded(place, tensor):
            return tensor
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None).clone()  # all have it: nothing is sent

    return _mapped(checkpoint, (), distributed)


def _mapped(content: Any, place: Place, change: Callable[[Place, Tensor], Any]) -> Any:
    """A copy of dictionaries and lists, with each tensor changed."""
    if isinstance(content, Tensor):
        return change(place, content)
    if type(content) is list:
        return [_mapped(value, (*place, i), change) for i, value in enumerate(content)]
    if isinstance(content, dict):
        changed = {key: _mapped(value, (*place, key), change) for key, value in content.items()}
        return changed if type(content) is dict else type(content)(changed)
    return content


def save(checkpoint: dict[str, Any], beside: Path, publish: Callable[[], None]) -> str | None:
    """Write a checkpoint into the new folder `beside`, flushed to the disk, and then have process 0 call `publish`.

    All processes call it together, with the same folder.

    Returns:
        Why it could not be written, the same on all processes; None if it was.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[str, Place] = {}

    def taken(place: Place, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        key = ".".join(map(str, place))
        tensors[key], places[key] = tensor, place
        return None

    content = {"checkpoint": _mapped(checkpoint, (), taken), "places": places}
    first = dist.get_rank() == 0

    def write_shards() -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(beside, sync_files=True))

    def write_rest() -> dict[str, list[int]]:
        if first:
            with (beside / REST).open("wb") as file:
                torch.save(content, file)
                _flush(file)
        files = [beside / METADATA, beside / REST] if first else []
        files += sorted(beside.glob(f"__{dist.get_rank()}_*.distcp"))
        return {path.name: [path.stat().st_size, _crc32(path)] for path in files}

    def finish() -> None:
        if first:
            with (beside / CHECKSUMS).open("w") as file:
                json.dump({name: sums for each in written for name, sums in each.items()}, file, indent=1)
                _flush(file)
            publish()

    try:
        _on_all(write_shards)
        written = _on_all(write_rest)
        _on_all(finish)
    except _Failed as error:
        return str(error)
    return None


class _Failed(Exception):  # noqa: N818
    """Some process could not write."""


def _on_all(step: Callable[[], Any]) -> list[Any]:
    """The results of all processes, by rank; _Failed on all if one failed."""
    result, reason = None, None
    try:
        result = step()
    except CheckpointException as error:  # it holds the errors of all processes; report our own if there is one
        failure = error.failures.get(dist.get_rank())
        reason = disk.cause_of(failure[0]) if failure else None
        reason = reason or ("" if dist.get_rank() else disk.cause_of(next(iter(error.failures.values()))[0]))
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        reason = disk.cause_of(error)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, reason))
    if reasons := [reason for _, reason in gathered if reason is not None]:
        raise _Failed(next(filter(None, reasons), "an unknown error"))
    return [result for result, _ in gathered]


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint has the size and the checksum that were written with it."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        found = {REST, METADATA, *(path.name for path in folder.glob("*.distcp"))}
        return found <= sums.keys() and all(
            (folder / name).stat().st_size == size and _crc32(folder / name) == crc
            for name, (size, crc) in sums.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _crc32(path: Path) -> int:
    crc = 0
    for block in _blocks(path):
        crc = zlib.crc32(block, crc)
    return crc


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield block

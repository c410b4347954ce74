"""Checkpoints that all processes write together: a folder, where each process saves the parts it holds.

The folder holds what a plain checkpoint does, key by key:

- `__0_0.distcp`, `__1_0.distcp`, ... and `.metadata`: the sharded tensors, by torch.distributed.checkpoint;
- `rest.pt`: everything else, with None where a sharded tensor goes;
- `checksums.json`: size and CRC-32 of each of these files. It is written last.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Sequence
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
from torch.utils._pytree import MappingKey, tree_map_with_path

from cait import disk

REST = "rest.pt"
CHECKSUMS = "checksums.json"
METADATA = ".metadata"

Place = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: keys of dictionaries and places in lists, from the top."""

_METADATA_NAMES = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
}


class _MetadataUnpickler(pickle.Unpickler):
    """The folder may be a stranger's, and a pickle is code: read nothing but descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # the module depends on Python's version
            return PurePosixPath
        known = name in _METADATA_NAMES.get(module, "").split()
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no description of a tensor")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with disk.open_file(Path(self.path) / METADATA) as file:
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
    disk.check_inside(folder)
    content = torch.load(folder / REST, map_location="cpu", weights_only=True)
    checkpoint, places = content["checkpoint"], content["places"]
    reader = _Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    tensors = {key: _empty(known[key], mesh) for key, place in places.items() if place[0] not in without}
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    for key, tensor in tensors.items():
        *outer, last = places[key]
        holder = checkpoint
        for step in outer:
            holder = holder[step]
        holder[last] = tensor
    return checkpoint


def _empty(described: Any, mesh: DeviceMesh | None) -> Tensor:
    if not isinstance(described, TensorStorageMetadata):  # torch would read anything else as a pickle, which is code
        raise pickle.UnpicklingError("a checkpoint's folder holds tensors alone")
    size, dtype = described.size, described.properties.dtype
    if mesh is None:
        return torch.empty(size, dtype=dtype)
    return empty_dtensor(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def share_out(checkpoint: dict[str, Any], mesh: DeviceMesh, names: set[str]) -> dict[str, Any]:
    """A plain checkpoint in which each process keeps only its part of the parameters `names` and of their moments."""

    def distributed(path: Any, value: Any) -> Any:
        place = _place(path)
        if not isinstance(value, Tensor) or value.ndim == 0:  # as a step count
            return value
        if place[0] != "optimizer_states" and not (place[0] in ("state_dict", "callbacks") and place[-1] in names):
            return value
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None).clone()  # all have it: nothing is sent

    return tree_map_with_path(distributed, checkpoint)


def _place(path: Any) -> Place:
    return tuple(step.key if isinstance(step, MappingKey) else step.idx for step in path)


def save(checkpoint: dict[str, Any], beside: Path, publish: Callable[[], None]) -> str | None:
    """Write a checkpoint into the new folder `beside`, flushed to the disk, and then have process 0 call `publish`.

    All processes call it together, with the same folder. Each gets the same reason why it failed, or None.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[str, Place] = {}
    rank = dist.get_rank()

    def take(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        key = ".".join(map(str, _place(path)))
        tensors[key], places[key] = value, _place(path)
        return None

    content = {"checkpoint": tree_map_with_path(take, checkpoint), "places": places}

    def write() -> dict[str, list[int]]:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(beside, sync_files=True))
        files = sorted(beside.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            with (beside / REST).open("wb") as file:
                torch.save(content, file)
            disk.flush(beside / REST)
            files += [beside / METADATA, beside / REST]
        return {path.name: [path.stat().st_size, _crc32(path)] for path in files}

    def finish() -> None:
        if rank == 0:
            sums = {name: of_file for each in written for name, of_file in each.items()}
            (beside / CHECKSUMS).write_text(json.dumps(sums, indent=1))
            disk.flush(beside / CHECKSUMS)
            publish()

    written, reason = _on_all(write)
    return reason or _on_all(finish)[1]


def _on_all(step: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """The results of all processes, by rank, and why one of them failed."""
    result, reason = None, None
    try:
        result = step()
    except CheckpointException as error:  # it holds the errors of all processes
        reason = disk.cause_of(next(iter(error.failures.values()))[0]) or "an unknown error"
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        reason = disk.cause_of(error) or "an unknown error"
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, reason))
    return [result for result, _ in gathered], next((reason for _, reason in gathered if reason), None)


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint has the size and the checksum that were written with it."""
    try:
        sums = disk.read_json(folder / CHECKSUMS, {...: [int]}, folder)
        found = {REST, METADATA, *(path.name for path in folder.glob("*.distcp"))}
        return found <= sums.keys() and all(
            (folder / name).stat().st_size == size and _crc32(folder / name) == crc
            for name, (size, crc) in sums.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _crc32(path: Path) -> int:
    crc = 0
    with disk.open_file(path) as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc

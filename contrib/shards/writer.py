"""Make shards of a data set, in several processes; a killed one goes on, and the files are the same."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_structure, treespec_dumps
from torch.utils.data import DataLoader, Dataset

from cait import disk
from cait.data.dataset import Samples
from cait.data.listing import below
from cait.data.reading import UnreadableImageError, open_bytes
from cait.data.source import DataSource
from cait.errors import UserError
from contrib.shards import INDEX, PLAN
from contrib.shards.pixels import Pixels, as_png
from contrib.shards.source import COLUMNS, TABLE, VERSION, chunk_name

SEED = 0
"""Seed of the order of training images in the chunks; each chunk is a random part of the set."""
LARGEST = 2**32
"""LitData's format can address chunks below this many bytes."""
LITDATA = {
    "data_format": ["bytes", "int"],
    "data_spec": treespec_dumps(tree_structure((b"", 0))),
    "item_loader": "PyTreeLoader",
    "types": "json",
} | dict.fromkeys(
    (
        "chunk_bytes",
        "compression",
        "compression_batch_size",
        "compression_level",
        "encryption",
        "ipc_compression",
    )
)
"""What LitData's index says of the items: pairs of bytes and a number."""
Record = dict[str, Any]
"""What shards.json and the table say of a chunk."""


def make(
    source: DataSource,
    sets: dict[str, Samples],
    root: str,
    splits: dict[str, str],
    out: Path,
    images: int,
    workers: int,
    pixels: Pixels | None = None,
) -> Iterator[int]:
    """Write shards of `source` to `out`, and yield the number of images of each chunk once it is made.

    A chunk appears by a rename, so it is whole or absent. Nothing in it depends on other chunks, on the number of
    processes or on earlier kills, as it would with `litdata.optimize`.

    Raises UserError if an image cannot be read, or `out` cannot be used.

    Args:
        source: a prepared source of the data set `root`, with which its images' names begin.
        sets: its images, by "train", "val" and maybe "test".
        splits: what the source calls the sets.
        images: images in a chunk.
        workers: processes.
        pixels: how the training images are changed; those of validation never are, so scores stay what they were.
    """
    names = {
        split: [os.fsencode(below(root, samples.name(index))) for index in range(len(samples))]
        for split, samples in sets.items()
    }
    head: Record = {"class_names": source.class_names, "images_per_chunk": images}
    if pixels:
        head["pixels"] = pixels.used()
    labels = getattr(source, "digest", b"")
    plan = json.dumps(
        {
            **head,
            **({"labels": labels.hex()} if labels else {}),
            "splits": splits,
            "names": {
                split: hashlib.sha256(b"\n".join(listed)).hexdigest()
                for split, listed in names.items()
            },
        }
    )
    content = {"version": VERSION, **head}
    with disk.file_lock(out.parent / f".{out.name}.lock"):
        _start_writing(out, plan, sets)
        chunks = Chunks(sets, out, images, pixels)
        records: dict[str, list[Record]] = {split: [] for split in sets}
        for split, record in DataLoader(chunks, None, num_workers=workers, collate_fn=tuple):
            records[split].append(record)
            yield len(record["labels"])
        for split, listed in names.items():
            content[split] = {
                "split": splits[split],
                **_finish(chunks, split, records[split], listed),
            }
        # last: it marks the shards as complete
        _write(out / INDEX, f"{json.dumps(content)}\n".encode())
        (out / PLAN).unlink()


def _write(path: Path, data: bytes) -> None:
    with disk.atomic_write(path) as beside:
        beside.write_bytes(data)


def _start_writing(out: Path, plan: str, splits: Iterable[str]) -> None:
    """Write the plan into a new folder. Raises UserError if the folder holds anything but a part of these shards."""
    path = out / PLAN
    if path.is_file():
        if path.read_text(encoding="utf-8") != plan:
            raise UserError(f"{out} holds a part of other shards; remove it or name another folder")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; name another one for the shards")
    for split in splits:
        (out / split).mkdir(parents=True, exist_ok=True)
    disk.clear_scratch(out)
    _write(path, plan.encode())


class Chunks(Dataset[tuple[str, Record]]):
    """Chunks to be made: indexing makes a missing one, and gives its set and what is known of it."""

    def __init__(
        self, sets: dict[str, Samples], out: Path, images: int, pixels: Pixels | None
    ) -> None:
        self.sets = sets
        self.images = images
        self.pixels = {"train": pixels}
        self.orders = {split: np.arange(len(samples)) for split, samples in sets.items()}
        generator = torch.Generator().manual_seed(SEED)
        self.orders["train"] = torch.randperm(len(sets["train"]), generator=generator).numpy()
        """For each set, the images in the order in which they lie in the chunks."""
        self.paths = {
            split: [out / chunk_name(split, number) for number in range(-(-len(order) // images))]
            for split, order in self.orders.items()
        }
        self.units = [
            (split, number, path)
            for split, paths in self.paths.items()
            for number, path in enumerate(paths)
        ]

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, unit: int) -> tuple[str, Record]:
        split, number, path = self.units[unit]
        if path.is_file():
            return split, described(path.read_bytes())
        indices = self.orders[split][number * self.images : (number + 1) * self.images].tolist()
        data = pack(
            (encoded(self.sets[split], index, self.pixels.get(split)) for index in indices),
            len(indices),
        )
        try:
            _write(path, data)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        return split, described(data)


def pack(images: Iterable[tuple[bytes, int]], count: int) -> bytes:
    """A chunk of `count` images and labels in LitData's format.

    In uint32 it holds `count`, the place of each item and the end. An item is the sizes of image and label in
    uint32, the image, and the label in int64. Raises UserError if the images are too large for one chunk.
    """
    items = []
    end = 4 * (count + 2)
    header = [count, end]
    for data, label in images:
        item = struct.pack("<II", len(data), 8) + data + struct.pack("<q", label)
        items.append(item)
        end += len(item)
        header.append(end)
        if end >= LARGEST:
            raise UserError(f"a chunk of {count} images would have more than 4 GB: lower --images")
    return np.array(header, "<u4").tobytes() + b"".join(items)


def described(chunk: bytes) -> Record:
    """Size and checksum of a chunk, and the columns of its images."""
    (count,) = struct.unpack_from("<I", chunk)
    bounds = np.frombuffer(chunk, "<u4", count + 1, 4)
    starts = bounds[:-1] + 8
    ends = bounds[1:] - 8
    return {
        "size": len(chunk),
        "sha256": hashlib.sha256(chunk).hexdigest(),
        "labels": np.array([struct.unpack_from("<q", chunk, end)[0] for end in ends], np.int32),
        "starts": starts,
        "sizes": ends - starts,
    }


def encoded(samples: Samples, index: int, pixels: Pixels | None) -> tuple[bytes, int]:
    """The bytes of an image's file, changed by `pixels` if it is given, and its label.

    An image that is decoded already becomes a PNG file, which keeps the pixels, the alpha channel and the EXIF
    orientation, so a run's settings apply as before. Raises UserError if the image cannot be read.
    """
    try:
        raw, label = samples[index]
        if isinstance(raw, Image.Image):
            data = as_png(raw, samples.name(index))
        else:
            with open_bytes(raw) as opened:
                data = opened.read()
        return pixels.stored(data, samples.name(index)) if pixels else data, label
    except UnreadableImageError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"cannot read the image {samples.name(index)}: {error.strerror or error}"
        ) from error


def _finish(chunks: Chunks, split: str, records: list[Record], names: list[bytes]) -> Record:
    """Write the table of a set and LitData's index of it; return what shards.json says of the files."""
    paths = chunks.paths[split]
    file = BytesIO()
    np.savez(file, **table_of(records, chunks.orders[split], names))
    table = file.getvalue()
    _write(paths[0].with_name(TABLE), table)
    listed = [
        {
            "chunk_bytes": record["size"],
            "chunk_size": len(record["sizes"]),
            "dim": None,
            "filename": path.name,
        }
        for path, record in zip(paths, records, strict=True)
    ]
    _write(
        paths[0].with_name("index.json"),
        json.dumps(
            {"chunks": listed, "config": {**LITDATA, "chunk_size": chunks.images}}, sort_keys=True
        ).encode(),
    )
    return {
        "table": [len(table), hashlib.sha256(table).hexdigest()],
        "chunks": [[record["size"], record["sha256"]] for record in records],
    }


def table_of(records: list[Record], order: np.ndarray, names: list[bytes]) -> Record:
    """The arrays of `contrib.shards.source.ShardSamples`, in the order of the source."""
    places = np.argsort(order).astype(np.int32)  # the inverse of a permutation
    table: Record = {
        "names": np.frombuffer(b"".join(names), np.uint8),
        "ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "places": places,
    }
    for name in COLUMNS:
        table[name] = np.concatenate([record[name] for record in records])[places]
    return table

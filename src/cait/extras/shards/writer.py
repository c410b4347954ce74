"""Make shards of a data set, in several processes; a killed one goes on, and the files are the same."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader, Dataset

from cait import disk
from cait.data.dataset import Samples
from cait.data.reading import PUBLISHED, UnreadableImageError, load_rgb, orientation
from cait.data.source import DataSource
from cait.errors import UserError
from cait.extras.shards import INDEX, PLAN, source
from cait.file_lock import file_lock

SEED = 0
"""Seed of the order of training images in the chunks; each chunk is a random part of the set."""
SCRATCH = ".scratch-"
LARGEST = 2**32
"""LitData's format can address chunks below this many bytes."""
LABEL_AFTER, SIZES_BEFORE = 8, 8
"""Bytes of an image's label, which follows it in a chunk, and of the two sizes in front of it."""
Record = dict[str, Any]
"""What is known of a chunk once it is made."""


def make(source: DataSource, root: str, splits: dict[str, str], out: Path, images: int, workers: int) -> Iterator[int]:
    """Write shards of `source` to `out`, and yield the number of images of each chunk once it is made.

    One chunk is one unit of work: it appears by a rename, so it is whole or absent. Nothing in it depends on other
    chunks, the number of processes or earlier kills. `litdata.optimize` cannot promise that: its
    chunks depend on the number of processes, it writes them in place, and its index holds the time.

    Args:
        source: a prepared source.
        root: the name of the data set, with which its images' names begin.
        splits: what the source calls its sets, by "train" and "val".
        images: images in a chunk.
        workers: processes.

    Raises:
        UserError: an image cannot be read, or `out` cannot be used.
    """
    sets = {"train": source.train, "val": source.val}
    names = {
        split: [relative(samples, root, index) for index in range(len(samples))] for split, samples in sets.items()
    }
    plan = json.dumps(
        {
            "class_names": source.class_names,
            "images_per_chunk": images,
            "splits": splits,
            "names": {split: hashlib.sha256(b"\n".join(listed)).hexdigest() for split, listed in names.items()},
        }
    )
    with file_lock(out.parent / f".{out.name}.lock"):
        _start_writing(out, plan)
        orders = {"train": _shuffled(len(sets["train"])), "val": np.arange(len(sets["val"]))}
        units = Units(sets, orders, out, images)
        yield from DataLoader(units, None, num_workers=workers, collate_fn=_as_it_is, worker_init_fn=_die_with_parent)
        _finish(out, source.class_names, splits, images, orders, names)


def _as_it_is(count: Any) -> Any:
    return count


def _die_with_parent(worker: int) -> None:
    if sys.platform == "linux":  # elsewhere a worker first finishes its chunk
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def chunks(count: int, images: int) -> int:
    """Number of chunks for so many images."""
    return -(-count // images)


def relative(samples: Samples, root: str, index: int) -> bytes:
    """The name of an image below the root of its data set, as a run's digest of the names has it."""
    return os.fsencode(samples.name(index)[len(root) + 1 :])


def _shuffled(count: int) -> np.ndarray:
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).numpy()


def _start_writing(out: Path, plan: str) -> None:
    """Write the plan into a new folder. Raises UserError if the folder holds anything but a part of these shards."""
    path = out / PLAN
    if (out / INDEX).is_file() and not path.is_file():
        raise UserError(f"{out} holds shards already; remove it or name another folder")
    if path.is_file():
        if path.read_text() != plan:
            raise UserError(f"{out} holds a part of other shards; remove it or name another folder")
        for scratch in out.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; name another one for the shards")
    for split in ("train", "val"):
        (out / split).mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as beside:
        beside.write_text(plan)


class Units(Dataset[int]):
    """Chunks to be made: indexing makes a missing chunk and gives its number of images.

    Args:
        orders: for each set, the images in the order in which they lie in the chunks.
    """

    def __init__(self, sets: dict[str, Samples], orders: dict[str, np.ndarray], out: Path, images: int) -> None:
        self.sets, self.orders, self.out, self.images = sets, orders, out, images
        self.units = [
            (split, number) for split, order in orders.items() for number in range(chunks(len(order), images))
        ]

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, unit: int) -> int:
        split, number = self.units[unit]
        indices = self.orders[split][number * self.images : (number + 1) * self.images]
        path = self.out / source.chunk_name(split, number)
        if not record_of(path).is_file():
            try:
                self._make(split, indices, path)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from error
        return len(indices)

    def _make(self, split: str, indices: np.ndarray, path: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.out) as scratch:
            writer = BinaryWriter(scratch, chunk_size=self.images)
            labels, sums, total = [], [], 0
            for place, index in enumerate(indices.tolist()):
                data, label = encoded(self.sets[split], index)
                total += len(data) + LABEL_AFTER + SIZES_BEFORE + 4
                if total + 8 >= LARGEST:
                    raise UserError(f"a chunk of {self.images} images would have more than 4 GB: lower --images")
                writer.add_item(place, (data, label))
                labels.append(label)
                sums.append(zlib.crc32(data))
            (written,) = writer.done()
            (index_file,) = Path(scratch).glob("*index.json")
            content = json.loads(index_file.read_text())
            data = Path(written).read_bytes()
            record = describe(data, labels, sums) | {"litdata": content["chunks"][0], "config": content["config"]}
            record["litdata"]["filename"] = path.name
            disk.flush(Path(written))
            Path(written).replace(path)
            beside = Path(scratch) / "record"
            beside.write_text(json.dumps(record))
            beside.replace(record_of(path))  # last: it marks the chunk as complete


def describe(data: bytes, labels: list[int], sums: list[int]) -> Record:
    """Where the images lie in a chunk. Raises RuntimeError if LitData writes another format than it did."""
    count = len(labels)
    items = np.frombuffer(data, np.uint32, count + 1, 4).astype(np.int64)
    starts, sizes = items[:-1] + SIZES_BEFORE, np.diff(items) - SIZES_BEFORE - LABEL_AFTER
    found = [zlib.crc32(data[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    if found != sums:
        raise RuntimeError("LitData's chunks are no longer laid out as `cait shards` reads them")
    return {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "labels": labels,
        "starts": starts.tolist(),
        "sizes": sizes.tolist(),
        "sums": sums,
    }


def encoded(samples: Samples, index: int) -> tuple[bytes, int]:
    """The unchanged bytes of an image's file, and its label; an image that is decoded already becomes a PNG file.

    The PNG file keeps the pixels, the alpha channel and the EXIF data, so a run's settings apply as before.

    Raises:
        UserError: the image cannot be read.
    """
    try:
        raw, label = samples[index]
        if isinstance(raw, Image.Image):
            return _as_png(raw, samples.name(index)), label
        with open(raw, "rb") if isinstance(raw, str | Path) else raw as opened:
            return opened.read(), label
    except UnreadableImageError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read the image {samples.name(index)}: {error.strerror or error}") from error


def _as_png(raw: Image.Image, name: str) -> bytes:
    file, turned = BytesIO(), orientation(raw)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    if raw.has_transparency_data:
        raw = raw.convert("RGBA")
    elif raw.mode != "L":
        raw = load_rgb(raw, name, PUBLISHED)
    raw.save(file, "PNG", **({"exif": exif} if turned != 1 else {}))
    return file.getvalue()


def record_of(chunk: Path) -> Path:
    """The file that marks a chunk as complete until all are made."""
    return chunk.with_name(f".{chunk.name}.json")


def _finish(
    out: Path,
    class_names: list[str],
    splits: dict[str, str],
    images: int,
    orders: dict[str, np.ndarray],
    names: dict[str, list[bytes]],
) -> None:
    """Write the tables and the indices, LitData's and ours, and remove what was only needed to go on."""
    content: Record = {"version": source.VERSION, "class_names": class_names, "images_per_chunk": images}
    for split, order in orders.items():
        paths = [out / source.chunk_name(split, number) for number in range(chunks(len(order), images))]
        records = [json.loads(record_of(path).read_text()) for path in paths]
        table = out / split / source.TABLE
        with disk.whole(table) as beside, beside.open("wb") as file:
            arrays: dict[str, Any] = _table(records, order, names[split])
            np.savez(file, **arrays)
        index = {"chunks": [record["litdata"] for record in records], "config": records[0]["config"]}
        with disk.whole(out / split / "index.json") as beside:
            beside.write_text(json.dumps(index, sort_keys=True))
        data = table.read_bytes()
        content[split] = {
            "split": splits[split],
            "table": [len(data), hashlib.sha256(data).hexdigest()],
            "chunks": [[record["size"], record["sha256"]] for record in records],
        }
    os.sync()  # everything must be on disk before the index that marks it complete
    with disk.whole(out / INDEX) as beside:
        beside.write_text(json.dumps(content) + "\n")
    for left in (*out.glob("*/.chunk-*.json"), out / PLAN):
        left.unlink()


def _table(records: list[Record], order: np.ndarray, names: list[bytes]) -> dict[str, np.ndarray]:
    """The arrays of `cait.extras.shards.source.ShardSamples`, in the order of the source."""
    kinds = {"labels": np.int32, "starts": np.uint32, "sizes": np.uint32, "sums": np.uint32}
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order))
    table = {
        name: np.concatenate([np.array(record[name], kind) for record in records])[places]
        for name, kind in kinds.items()
    }
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return {"names": np.frombuffer(b"".join(names), np.uint8), "ends": ends, "places": places, **table}

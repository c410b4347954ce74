"""Shards: images in chunks of LitData's format, read by index in the order of the set that they were made of."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from cait.data.dataset import NO_LABEL
from cait.data.folder import root_name
from cait.errors import UserError, one_line
from cait.extras.shards import INDEX, PLAN
from cait.extras.shards.bucket import Bucket, Piece

TABLE = "images.npz"
COLUMNS = ("ends", "labels", "places", "starts", "sizes", "sums")
CACHE = Path("data/cache")
VERSION = 1


class Split(NamedTuple):
    """One of the two sets: the name that its source gives it, its table of images and its chunks."""

    split: str
    table: Piece
    chunks: list[Piece]


class Index(NamedTuple):
    """What shards.json says."""

    class_names: list[str]
    images_per_chunk: int
    splits: dict[str, Split]
    """train and val"""


class Place(Protocol):
    """Where shards are."""

    def index(self) -> bytes:
        """The bytes of shards.json. Raises UserError if there is none."""
        ...

    def whole(self, piece: Piece) -> bytes:
        """A small file, its checksum verified. Raises UserError."""
        ...

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """`size` bytes of a chunk from `start` on. Raises UserError."""
        ...


class Folder:
    """Shards in a folder, local or mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def index(self) -> bytes:
        if not self.root.is_dir():
            raise UserError(f"the folder of shards {self.root} does not exist")
        try:
            return (self.root / INDEX).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.root / INDEX}: {error.strerror}") from error

    def whole(self, piece: Piece) -> bytes:
        path = self.root / piece.name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise UserError(f"{path} is damaged: its checksum is not the one in {INDEX}")
        return data

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        path = self.root / piece.name
        try:
            data = read_part(path, start, size)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if len(data) < size:
            raise UserError(f"{path} is cut off: copy it again")
        return data

    def check_sizes(self, pieces: list[Piece]) -> None:
        """Raise UserError at the first file that is missing or has another size; nothing is read."""
        for piece in pieces:
            path = self.root / piece.name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from error
            if size != piece.size:
                raise UserError(f"{path} has {size:,} bytes, {INDEX} says {piece.size:,}: copy it again")


def read_part(path: Path, start: int, size: int) -> bytes:
    """At most `size` bytes of a file. The file is not kept open, so a worker holds none and a cache may remove it."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.pread(file, size, start)
    finally:
        os.close(file)


class ShardSamples:
    """Images of one set in chunks, as `cait.data.dataset.Samples`.

    What is known of an image lies in arrays, so that the loader's workers share it.

    Args:
        root: where the shards are; names in messages begin with it.
        table: for each image, in the order of the source: `names` (their bytes, one after the other) and `ends`,
            `labels`, `places` (the place in the chunks, counted through), `starts` and `sizes` of its bytes in its
            chunk, `sums` (their CRC-32).
        read: reads bytes of a chunk.
        checked: compare the bytes of each image with its sum.
    """

    def __init__(
        self,
        root: str,
        table: dict[str, np.ndarray],
        chunks: list[Piece],
        images_per_chunk: int,
        read: Callable[[Piece, int, int], bytes],
        checked: bool = False,
    ) -> None:
        self.root, self.chunks, self.read, self.checked = root, chunks, read, checked
        self.names, self.ends, self.labels = (table[name] for name in ("names", "ends", "labels"))
        self.starts, self.sizes, self.sums = (table[name] for name in ("starts", "sizes", "sums"))
        self.chunk_of = table["places"] // images_per_chunk
        """The chunk of each image, counted from 0."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return f"{self.root}/{os.fsdecode(self.names[start : self.ends[index]].tobytes())}"

    def __getitem__(self, index: int) -> tuple[BytesIO, int]:
        """The encoded image and the index of its class. Raises UserError, which ends the run, if its chunk is torn."""
        piece = self.chunks[self.chunk_of[index]]
        data = self.read(piece, int(self.starts[index]), int(self.sizes[index]))
        if self.checked and zlib.crc32(data) != self.sums[index]:
            raise UserError(f"{self.root}/{piece.name} is damaged: {self.name(index)} has another checksum")
        return BytesIO(data), int(self.labels[index])


class ShardSource:
    """Shards in a folder, or in a bucket by way of a cache.

    Args:
        root: a folder, s3://bucket/folder or gs://bucket/folder.
        train_split: the name in the source of the shards; only that name and the default are accepted.
        val_split: the same for validation.
        cache_dir: folder of the cache.
        cache_gb: most that the cache's chunks may take, in 10⁹ bytes.
        by_chunk: fetch whole chunks for the training images even if not all chunks fit into the cache; otherwise
            an image that is not in the cache is fetched by itself.
    """

    def __init__(
        self,
        root: str,
        train_split: str = "train",
        val_split: str = "val",
        cache_dir: Path = CACHE,
        cache_gb: float = 20.0,
        by_chunk: bool = False,
    ) -> None:
        self.root, self.by_chunk = root_name(root), by_chunk
        self._given = {"train": train_split, "val": val_split}
        self.cache_dir, self.limit = cache_dir, int(cache_gb * 1e9)

    def prepare(self) -> None:
        """Do nothing: chunks are fetched as they are needed."""

    def verify(self) -> Iterator[str]:
        """Compare the checksums of all files, and print how many were compared. Yields a line for each damaged one."""
        for name, split in parse(self.place.index(), f"{self.root}/{INDEX}").splits.items():
            for piece in (split.table, *split.chunks):
                try:
                    self.place.whole(piece)
                except UserError as error:
                    yield str(error)
            print(f"{self.root}/{name}: {len(split.chunks):,} chunk(s), checksums compared", flush=True)

    @cached_property
    def place(self) -> Place:
        return Bucket(self.root, self.cache_dir, self.limit) if "://" in self.root else Folder(Path(self.root))

    @cached_property
    def index(self) -> Index:
        found = parse(self.place.index(), f"{self.root}/{INDEX}")
        for name, split in found.splits.items():
            if self._given[name] not in (name, split.split):
                raise UserError(
                    f"--data.{name}_split {self._given[name]}: {self.root} was made of {split.split}; leave it out"
                )
        chunks = [piece for split in found.splits.values() for piece in split.chunks]
        if isinstance(self.place, Folder):
            self.place.check_sizes(chunks)
        elif (largest := max(piece.size for piece in chunks)) > self.limit:
            raise UserError(f"a chunk of {self.root} has {largest / 1e9:.2f} GB: raise --data.cache_gb")
        return found

    @cached_property
    def all_fit(self) -> bool:
        """Whether all chunks are here, or would fit into the cache."""
        sizes = (piece.size for split in self.index.splits.values() for piece in split.chunks)
        return isinstance(self.place, Folder) or sum(sizes) <= self.limit

    def check_room(self, chunks: int) -> None:
        """Raise UserError if the cache is too small for `chunks` chunks."""
        sizes = sorted(piece.size for piece in self.index.splits["train"].chunks)
        if not self.all_fit and sum(sizes[-chunks:]) > self.limit:
            raise UserError(
                f"{chunks} chunks of {self.root} have {sum(sizes[-chunks:]) / 1e9:.2f} GB, more than the cache of "
                f"{self.limit / 1e9:g} GB: raise --data.cache_gb or lower --data.window"
            )

    @property
    def class_names(self) -> list[str]:
        return self.index.class_names

    @cached_property
    def train(self) -> ShardSamples:
        return self._samples("train", self.by_chunk or self.all_fit)

    @cached_property
    def val(self) -> ShardSamples:
        return self._samples("val", True)  # validation reads all images in order

    def _samples(self, name: str, by_chunk: bool) -> ShardSamples:
        split = self.index.splits[name]
        table = read_table(self.place.whole(split.table), f"{self.root}/{split.table.name}")
        if not _fits(table, self.index, len(split.chunks)):
            raise UserError(f"{self.root}/{split.table.name} names chunks or classes that {INDEX} does not")
        if isinstance(self.place, Bucket) and not by_chunk:
            read, checked = self.place.read_alone, True
        else:
            read, checked = self.place.read, False
        return ShardSamples(self.root, table, split.chunks, self.index.images_per_chunk, read, checked)


def is_shards(root: str) -> bool:
    """Whether `root` is a folder of shards, or an address.

    Raises:
        UserError: this kind of address is not supported, or the shards in the folder are not finished.
    """
    scheme, separator, _ = root.partition("://")
    if separator:
        if scheme not in ("s3", "gs"):
            raise UserError(f"{root}: shards are read from a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
        return True
    folder = Path(root)
    if (folder / PLAN).is_file() and not (folder / INDEX).is_file():
        raise UserError(f"the shards in {root} are not finished: give the same `cait shards` command again")
    return (folder / INDEX).is_file()


def chunk_name(split: str, number: int) -> str:
    """The path of a chunk below the root, named like the chunks of LitData's first worker."""
    return f"{split}/chunk-0-{number}.bin"


def parse(text: bytes, name: str) -> Index:
    """Read shards.json. It holds no file names, so it cannot name other files.

    Raises:
        UserError: it is not what `cait shards` writes.
    """
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise UserError(f"{name} is of version {content['version']}, this program reads version {VERSION}")
        splits = {
            split: Split(
                str(content[split]["split"]),
                _piece(f"{split}/{TABLE}", content[split]["table"]),
                [_piece(chunk_name(split, number), chunk) for number, chunk in enumerate(content[split]["chunks"])],
            )
            for split in ("train", "val")
        }
        names, images = [str(class_name) for class_name in content["class_names"]], int(content["images_per_chunk"])
        if images < 1:
            raise ValueError(f"{images} images in a chunk")
        return Index(names, images, splits)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{name} is not an index of shards, as `cait shards` writes it: {error!r}") from error


def _piece(name: str, found: Any) -> Piece:
    size, sha256 = found
    return Piece(name, int(size), str(sha256))


def read_table(data: bytes, name: str) -> dict[str, np.ndarray]:
    """The arrays of images.npz. Raises UserError if it is something else."""
    try:
        with np.load(BytesIO(data)) as arrays:
            table = {column: arrays[column] for column in ("names", *COLUMNS)}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{name} is not a table of images: {one_line(error)}") from error
    if len({len(table[column]) for column in COLUMNS}) != 1:
        raise UserError(f"{name} is not a table of images: its columns differ in length")
    return table


def _fits(table: dict[str, np.ndarray], index: Index, chunks: int) -> bool:
    """Whether the places of all images are in the chunks, and their labels among the classes or NO_LABEL."""
    within = {"places": (0, chunks * index.images_per_chunk), "labels": (NO_LABEL, len(index.class_names))}
    return all(((table[name] >= first) & (table[name] < end)).all() for name, (first, end) in within.items())

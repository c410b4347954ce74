"""Shards: images in chunks of LitData's format, read by index in the order of the set that they were made of."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from cait.data.folder import Splits
from cait.errors import UserError
from cait.extras.display import root_name
from contrib.shards import INDEX, Shards
from contrib.shards.bucket import Bucket, Piece, read_part
from contrib.shards.pixels import Pixels

TABLE = "images.npz"
CACHE = "data/cache"
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
    pixels: Pixels | None
    """How the training images were changed; None if they are the bytes of the image files."""


class Folder:
    """Shards in a folder, local or mounted. All methods raise UserError if a file is missing or damaged."""

    limit = math.inf

    def __init__(self, root: Path) -> None:
        self.root = root

    def index(self) -> bytes:
        """The bytes of shards.json."""
        path = self.root / INDEX
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error

    def read(self, piece: Piece, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on."""
        path = f"{self.root}/{piece.name}"
        try:
            data = read_part(path, start, size)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if len(data) < size:
            raise UserError(f"{path} is cut off: copy it again")
        return data

    read_alone = read

    def whole(self, piece: Piece) -> bytes:
        """All of a file, as it is."""
        return self.read(piece, 0, piece.size)

    def check(self, piece: Piece) -> None:
        """Check that a chunk is there, to its last byte."""
        self.read(piece, piece.size - 1, 1)


@dataclass(eq=False)
class ShardSamples:
    """Images of one set in chunks, as `cait.data.dataset.Samples`.

    What is known of an image lies in arrays, so that the loader's workers share it.
    """

    root: str
    """Where the shards are; names in messages begin with it."""
    table: dict[str, np.ndarray]
    """For each image, in the order of the source: `names` (their bytes, one after the other) and `ends`, `labels`,
    `places` (the place in the chunks, counted through), `starts` and `sizes` of its bytes in its chunk, `sums` (their
    CRC-32)."""
    chunks: list[Piece]
    images_per_chunk: int
    read: Callable[[Piece, int, int], bytes]
    checked: bool = False
    """Compare the bytes of each image with its sum."""

    def __post_init__(self) -> None:
        self.labels = self.table["labels"]
        self.chunk_of = self.table["places"] // self.images_per_chunk
        """The chunk of each image, counted from 0."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        ends = self.table["ends"]
        name = self.table["names"][ends[index - 1] if index else 0 : ends[index]]
        return f"{self.root}/{os.fsdecode(name.tobytes())}"

    def __getitem__(self, index: int) -> tuple[BytesIO, int]:
        """As in `Samples`. Raises UserError, which ends the run, if the chunk is torn."""
        piece = self.chunks[self.chunk_of[index]]
        start, size = int(self.table["starts"][index]), int(self.table["sizes"][index])
        data = self.read(piece, start, size)
        if self.checked and zlib.crc32(data) != self.table["sums"][index]:
            raise UserError(f"{self.root}/{piece.name} is damaged: {self.name(index)} has another checksum")
        return BytesIO(data), int(self.labels[index])


class ShardSource:
    """Shards in a folder, or in a bucket by way of a cache. A split may only have the name that the shards have it by.

    Training on a bucket fetches whole chunks if all fit into the cache or the order is "windowed". Otherwise it fetches
    each image that is not in the cache by itself.
    """

    def __init__(self, splits: Splits, shards: Shards, settings: Mapping[str, Any] | None = None) -> None:
        self.root, self.shards, self.settings = root_name(splits.root), shards, settings or {}
        self._given = {"train": splits.train_split, "val": splits.val_split}

    def prepare(self) -> None:
        """Do nothing: chunks are fetched as they are needed."""

    def verify(self) -> Iterator[str]:
        """Compare the checksums of all files, and print how many were compared. Yields a line for each damaged one."""
        for name, split in self.index.splits.items():
            for piece in (split.table, *split.chunks):
                try:
                    self._whole(piece)
                except UserError as error:
                    yield str(error)
            print(f"{self.root}/{name}: {len(split.chunks):,} chunk(s), checksums compared", flush=True)

    def _whole(self, piece: Piece) -> bytes:
        data = self.place.whole(piece)
        if not piece.is_in(data):
            raise UserError(f"{self.root}/{piece.name} is damaged: its checksum is not the one in {INDEX}")
        return data

    @cached_property
    def place(self) -> Folder | Bucket:
        if "://" in self.root:
            return Bucket(self.root, Path(self.shards.data_dir or CACHE), int(self.shards.cache_gb * 1e9))
        return Folder(Path(self.root))

    @cached_property
    def index(self) -> Index:
        found = parse(self.place.index(), f"{self.root}/{INDEX}")
        for name, split in found.splits.items():
            if self._given[name] not in (name, split.split):
                raise UserError(
                    f"--data.{name}_split {self._given[name]}: {self.root} was made of {split.split}; leave it out"
                )
        return found

    @cached_property
    def all_fit(self) -> bool:
        """Whether all chunks are here, or would fit into the cache."""
        return sum(piece.size for split in self.index.splits.values() for piece in split.chunks) <= self.place.limit

    def check_room(self, chunks: int) -> None:
        """Raise UserError if the cache is too small for `chunks` chunks."""
        needed = sum(sorted(piece.size for piece in self.index.splits["train"].chunks)[-chunks:])
        if not self.all_fit and needed > self.place.limit:
            raise UserError(
                f"{chunks} chunks of {self.root} have {needed / 1e9:.2f} GB, more than the cache of "
                f"{self.place.limit / 1e9:g} GB: raise --data.cache_gb or lower --data.window"
            )

    @property
    def class_names(self) -> list[str]:
        return self.index.class_names

    @property
    def digest(self) -> bytes:
        """How the training images were changed; a run does not go on with others."""
        return str(self.index.pixels or "").encode()

    @cached_property
    def order(self) -> Any:
        """The order of the training images, None for the published one.

        Raises:
            UserError: the settings do not suit the shards.
        """
        from contrib.shards.order import choose

        if self.index.pixels:
            self.index.pixels.check(self.settings)
        return choose(self, self.shards)

    @cached_property
    def train(self) -> ShardSamples:
        return self._samples("train", alone=not self.all_fit and self.shards.order == "published")

    @cached_property
    def val(self) -> ShardSamples:
        return self._samples("val", alone=False)  # validation reads all images in order

    def _samples(self, name: str, alone: bool) -> ShardSamples:
        split = self.index.splits[name]
        for piece in split.chunks:
            self.place.check(piece)
        read = self.place.read_alone if alone else self.place.read
        try:
            with np.load(BytesIO(self._whole(split.table))) as file:
                table = dict(file)
            check_table(table, split.chunks, self.index.images_per_chunk, len(self.index.class_names))
        except (ValueError, KeyError, BadZipFile) as error:  # a UserError is a ValueError
            reason = str(error) if isinstance(error, UserError) else f"its table is damaged: {error!r}"
            raise UserError(f"{self.root}/{split.table.name}: {reason}") from error
        where = (self.root, table, split.chunks, self.index.images_per_chunk)
        return ShardSamples(*where, read, checked=alone)


def check_table(table: Mapping[str, np.ndarray], chunks: Sequence[Piece], images: int, classes: int) -> None:
    """Raise UserError if a table of images does not fit its chunks of `images` images each, and the classes.

    It is a ValueError or a KeyError if one of its arrays is missing, or is none of whole numbers.
    """
    columns = [table[name] for name in ("ends", "places", "labels", "starts", "sizes", "sums")]
    lengths = {len(column) if column.ndim == 1 and column.dtype.kind in "iu" else -1 for column in columns}
    if len(lengths) > 1 or lengths <= {0, -1}:
        raise UserError("the columns of its table have different lengths, or hold no numbers")
    ends, places, labels, starts, sizes = (column.astype(np.int64) for column in columns[:5])
    chunk_of = places // images
    room = np.array([piece.size for piece in chunks])
    names_fit = (np.diff(ends, prepend=0) >= 0).all() and ends[-1] == len(table["names"])
    if not names_fit or not ((places >= 0) & (chunk_of < len(chunks)) & (labels >= -1) & (labels < classes)).all():
        raise UserError("its table names images, chunks or classes that are not there")
    if (starts + sizes > room[chunk_of]).any():
        raise UserError("its table reaches past the end of a chunk")


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
        if content["version"] == VERSION:
            splits = {
                split: Split(
                    content[split]["split"],
                    Piece(f"{split}/{TABLE}", *content[split]["table"]),
                    [Piece(chunk_name(split, number), *chunk) for number, chunk in enumerate(content[split]["chunks"])],
                )
                for split in ("train", "val")
            }
            names, images = content["class_names"], content["images_per_chunk"]
            sizes = [piece.size for split in splits.values() for piece in (split.table, *split.chunks)]
            if min(images, *sizes) < 1:
                raise ValueError("a size is less than 1")
            if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
                raise ValueError("class_names is no list of at least 2 names")
            pixels = Pixels(**content["pixels"]) if "pixels" in content else None
            return Index(names, images, splits, pixels)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{name} is not an index of shards, as `cait shards` writes it: {error!r}") from error
    raise UserError(f"{name} is of version {content['version']}, this program reads version {VERSION}")

"""Shards: images in chunks of LitData's format, read by index in the order of the set that they were made of."""

import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cait.data.folder import Splits
from cait.disk import check_packed
from cait.errors import UserError, told_as
from cait.extras.display import root_name
from contrib.shards import INDEX, Shards
from contrib.shards.bucket import Bucket, Folder, Piece
from contrib.shards.pixels import Pixels

TABLE = "images.npz"
CACHE = "data/cache"
VERSION = 1
SPLITS = ("train", "val", "test")
"""Not every data set has the last."""
COLUMNS = ("labels", "starts", "sizes")
"""Of the table, besides the names and the places."""


def _piece(name: str, size: Any, sha256: Any) -> Piece:
    """A file as the index lists it. Raises TypeError if its size is no whole number."""
    return Piece(name, operator.index(size), str(sha256))


def chunk_name(split: str, number: int) -> str:
    """The path of a chunk below the root, named like the chunks of LitData's first worker."""
    return f"{split}/chunk-0-{number}.bin"


@dataclass(eq=False)
class ShardSamples:
    """Images of one set in chunks, as `cait.data.dataset.Samples`.

    What is known of an image lies in arrays, so that the loader's workers share it.
    """

    root: str
    """Where the shards are; names in messages begin with it."""
    table: Mapping[str, np.ndarray]
    """For each image, in the order of the source: `names` (their bytes, one after the other) and `ends`, `labels`,
    `places` (the place in the chunks, counted through), `starts` and `sizes` of its bytes in its chunk."""
    chunks: list[Piece]
    images_per_chunk: int
    place: Folder

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
        data = self.place.read(
            piece, int(self.table["starts"][index]), int(self.table["sizes"][index])
        )
        return BytesIO(data), int(self.labels[index])


@dataclass(frozen=True)
class Windowed:
    """Images of at most `window` chunks at a time, as `cait.data.loader.Order`. It is not as published.

    The chunks are put into a seeded order, and each image follows its chunk's turn by a random distance below `window`
    chunks. So at most `window` chunks are in use at any moment, and each is used once in an epoch.
    """

    chunks: Tensor
    """The chunk of each image, counted from 0."""
    window: int

    @cached_property
    def name(self) -> str:
        layout = hashlib.sha256(self.chunks.numpy().tobytes()).hexdigest()[:16]
        return f"windowed over {self.window} of the chunks {layout}"

    def __call__(self, generator: torch.Generator) -> Tensor:
        turns = torch.randperm(int(self.chunks.max()) + 1, generator=generator)
        behind = self.window * torch.rand(
            len(self.chunks), dtype=torch.float64, generator=generator
        )
        return torch.argsort(turns[self.chunks] + behind, stable=True)


class ShardSource:
    """Shards in a folder, or in a bucket by way of a cache. A split may only have the name that they have it by."""

    def __init__(
        self, splits: Splits, shards: Shards, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.root = root_name(splits.root)
        self.shards = shards
        self.settings = settings or {}
        self._asked = {"train": splits.train_split, "val": splits.val_split, "test": "test"}
        self.place = Folder(self.root)
        if "://" in self.root:
            self.place = Bucket(
                self.root, Path(shards.data_dir or CACHE), int(shards.cache_gb * 1e9)
            )

    def prepare(self) -> None:
        """Do nothing: chunks are fetched as they are needed."""

    @cached_property
    def index(self) -> dict[str, Any]:
        """What shards.json says, and the set's `Piece`s. It holds no file names, so it cannot name other files."""
        with told_as(f"{self.root}/{INDEX} is no index for this program"):
            index = json.loads(self.place.index())
            if index["version"] != VERSION:
                raise ValueError(
                    f"it is of version {index['version']}, this program reads version {VERSION}"
                )
            if not all(isinstance(name, str) for name in index["class_names"]):
                raise ValueError("a class has a name that is no text")
            index["pixels"] = Pixels(**index["pixels"]) if "pixels" in index else None
            index["splits"] = [split for split in SPLITS if split != "test" or split in index]
            for split in index["splits"]:
                files = index[split]
                files["table"] = _piece(f"{split}/{TABLE}", *files["table"])
                files["chunks"] = [
                    _piece(chunk_name(split, number), *chunk)
                    for number, chunk in enumerate(files["chunks"])
                ]
                asked = self._asked[split]
                if asked not in (split, files["split"]):
                    raise ValueError(
                        f"it was made of {files['split']}: leave out --data.{split}_split {asked}"
                    )
        return index

    def verify(self) -> Iterator[str]:
        """Compare the checksums of all files, and print how many were compared. Yields a line for each damaged one."""
        for split in self.index["splits"]:
            files = self.index[split]
            for piece in (files["table"], *files["chunks"]):
                try:
                    self.place.whole(piece)
                except UserError as error:
                    yield str(error)
            print(
                f"{self.root}/{split}: {len(files['chunks']):,} chunk(s), checksums compared",
                flush=True,
            )

    @property
    def class_names(self) -> list[str]:
        return self.index["class_names"]

    @property
    def digest(self) -> bytes:
        """How the training images were changed; a run does not go on with others."""
        return str(self.index["pixels"] or "").encode()

    @cached_property
    def order(self) -> Windowed | None:
        """The order of the training images; None for the published one.

        Raises UserError if the run reads other pixels than the shards hold, or the cache is too small for the order.
        """
        if self.index["pixels"]:
            self.index["pixels"].check(self.settings)
        sizes = {
            split: [piece.size for piece in self.index[split]["chunks"]]
            for split in self.index["splits"]
        }
        windowed = self.shards.order == "windowed"
        needed = sum(map(sum, sizes.values()))
        what = "the chunks"
        remedy = "give --data.order windowed"
        if windowed and needed > self.place.limit:
            chunks = self.shards.window + 1
            needed = sum(sorted(sizes["train"])[-chunks:])
            what = f"{chunks} chunks"
            remedy = "lower --data.window"
        if needed > self.place.limit:
            raise UserError(
                f"{what} of {self.root} have {needed / 1e9:.2f} GB, more than the cache of "
                f"{self.place.limit / 1e9:g} GB: raise --data.cache_gb or {remedy}"
            )
        return (
            Windowed(torch.from_numpy(self.train.chunk_of).long(), self.shards.window)
            if windowed
            else None
        )

    @cached_property
    def train(self) -> ShardSamples:
        return self._samples("train")

    @cached_property
    def val(self) -> ShardSamples:
        return self._samples("val")

    @cached_property
    def test(self) -> ShardSamples | None:
        """The test split, if the data set has one."""
        return self._samples("test") if "test" in self.index["splits"] else None

    def _samples(self, split: str) -> ShardSamples:
        chunks = self.index[split]["chunks"]
        for piece in chunks:
            self.place.check(piece)
        content = self.place.whole(self.index[split]["table"])
        path = f"{self.root}/{split}/{TABLE}"
        with told_as(f"{path} is no table of these shards"):
            with np.load(BytesIO(content)) as file:
                check_packed(file.zip, path, len(content))
                table = {name: file[name] for name in ("names", "ends", "places", *COLUMNS)}
            if any(column.ndim != 1 or column.dtype.kind not in "iu" for column in table.values()):
                raise ValueError("a column holds other than whole numbers")
            samples = ShardSamples(
                self.root, table, chunks, self.index["images_per_chunk"], self.place
            )
            if {len(table[name]) for name in ("ends", "places", *COLUMNS)} != {len(samples)}:
                raise ValueError("its columns differ in length")
            known = (samples.labels < len(self.class_names)) & (samples.chunk_of < len(chunks))
            if not known.all() or any(
                (table[name] < 0).any() for name in ("places", "starts", "sizes")
            ):
                raise ValueError("it is of other chunks or classes")
            ends = np.array([piece.size for piece in chunks])[samples.chunk_of]
            if (table["sizes"] > ends - table["starts"]).any():
                raise ValueError("it names images past the end of their chunk")
        return samples

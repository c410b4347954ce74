"""Shards: a data set in chunks, to train from a folder or straight from S3; `cait shards` makes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cait.errors import UserError
from cait.plugins import Verb
from cait.settings import Group, PositiveFloat, PositiveInt, Settings, group

VERBS = {
    "shards": Verb(
        "contrib.shards.verb:shards",
        "pack a data set into chunks, to train from a folder or S3: cait shards DIR OUT",
    )
}

INDEX = "shards.json"
"""Classes, and size and checksum of every file; written last, so that shards with it are whole."""
PLAN = ".plan.json"
"""File in unfinished shards that says what they are made from."""


@dataclass(frozen=True)
class Shards(Group):
    """How shards are read. `root` may also be a folder of shards, "s3://bucket/folder" or "gs://bucket/folder"."""

    data_dir: str | None = None
    """For shards in a bucket it is the folder of their cache; None means data/cache."""
    cache_gb: PositiveFloat = 20.0
    """Largest size of the shards' cache, in 10⁹ bytes; the processes of a machine share it."""
    order: Literal["published", "windowed"] = "published"
    """"published" draws images from the whole set. "windowed" is for shards in a bucket that is larger than the cache:
    it draws from `window` chunks at a time, see `contrib.shards.source.Windowed`."""
    window: PositiveInt = 8
    """Chunks that the "windowed" order draws from."""


GROUPS = {"data": "contrib.shards:Shards"}


def open_source(root: str, settings: Settings) -> Any:
    """The shards at `root`; None if there are none.

    Raises UserError if this kind of address is not supported, or the shards in the folder are not finished.
    """
    if "://" in root:
        if not root.startswith(("s3://", "gs://")):
            raise UserError(
                f"{root}: shards are read from a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER"
            )
    elif not (Path(root) / INDEX).is_file():
        if (Path(root) / PLAN).is_file():
            raise UserError(
                f"the shards in {root} are not finished: give the same `cait shards` command again"
            )
        if settings.get("order") == "windowed":
            raise UserError(
                f"--data.order windowed is for shards, {root} is none; `cait shards` makes them"
            )
        return None
    from cait.data.folder import Splits
    from contrib.shards.source import ShardSource

    return ShardSource(group(Splits, settings), group(Shards, settings), settings)

"""Names of classes that may be meant otherwise."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from cait.data.folder import TRAIN_NAMES, VAL_NAMES, FolderSource
from cait.errors import abbreviate, tell_once


def tell_of_names(data: Any) -> None:
    """Say which names of a data module's classes are nearly one, or are those of splits."""
    for line in _doubts(data):
        tell_once(f"{data.root}: {line}")


def _doubts(data: Any) -> Iterator[str]:
    similar = defaultdict[str, list[str]](list)
    for name in data.class_names:
        visible = [sign for sign in name.casefold() if sign.isprintable() and sign != " "]
        similar["".join(visible)].append(name)
    pairs = [" and ".join(map(repr, same)) for same in similar.values() if len(same) > 1]
    if pairs:
        yield f"{abbreviate(pairs)} differ in letter case or blanks alone, and are classes apart"
    words = {*re.split("[^a-z]+", " ".join(data.class_names).lower())}
    has_splits = words & {*TRAIN_NAMES} and words & {*VAL_NAMES}  # as in seg_train and seg_test
    if has_splits and type(data.source) is FolderSource and data.source.holds_out:
        yield f"{abbreviate(data.class_names)} are taken for classes; see --data.train_split and --data.val_split"

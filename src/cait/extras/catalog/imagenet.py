"""ImageNet as it is downloaded: unpack the ILSVRC2012 archives into class folders, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torchvision.datasets.imagenet import (
    ARCHIVE_META,
    META_FILE,
    load_meta_file,
    parse_devkit_archive,
    parse_train_archive,
    parse_val_archive,
)

from cait.errors import UserError, one_line
from cait.file_lock import file_lock

ARCHIVES: dict[str, str] = {part: name for part, (name, _) in ARCHIVE_META.items()}
"""File names of the archives "train", "val" and "devkit"."""


def unpack(root: Path, train_split: str = "train", val_split: str = "val") -> None:
    """Unpack the archives in `root` into `root/{train_split,val_split}/<wnid>/*.JPEG`, with torchvision.

    Does nothing if both folders exist. A folder appears by one rename, so it is whole or absent; the next call removes
    what a killed one has left. One process unpacks and all others wait. torchvision checks the MD5 sums of the
    published files first. The archives stay; the folders need as much space again, 155 GB.

    Raises:
        UserError: an archive is missing or is not the published file, or the disk is too full.
    """
    folders = {"train": root / train_split, "val": root / val_split}
    if all(folder.is_dir() for folder in folders.values()):
        return
    with file_lock(root / ".unpacking.lock"):
        missing = [part for part, folder in folders.items() if not folder.is_dir()]
        needed = [*missing, *(["devkit"] if "val" in missing else [])]
        if absent := [ARCHIVES[part] for part in needed if not (root / ARCHIVES[part]).is_file()]:
            raise UserError(f"to unpack ImageNet {root} needs {' and '.join(absent)} too")
        for part in missing:
            _unpack_whole(part, root.absolute(), folders[part])


def _unpack_whole(part: str, root: Path, folder: Path) -> None:
    """Unpack one part beside its folder, and rename it at the end."""
    scratch = root / ".unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        _unpack(part, root, scratch)
        os.sync()  # the images must be on disk before the name that marks them complete
        if part == "val":  # torchvision's ImageNet reads the classes' names from this file
            (scratch / META_FILE).replace(root / META_FILE)
        (scratch / part).rename(folder)
    except UserError:
        raise
    except Exception as error:  # torchvision's, tarfile's, the disk's
        raise UserError(f"cannot unpack {root / ARCHIVES[part]}: {one_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(part: str, root: Path, scratch: Path) -> None:
    """Unpack one part into `scratch`. Given an absolute name, torchvision reads the archive there."""
    archive = root / ARCHIVES[part]
    free, size = shutil.disk_usage(root).free, archive.stat().st_size
    if free < size:
        raise UserError(f"to unpack {archive} {size / 1e9:.1f} GB are needed in {root}, {free / 1e9:.1f} GB are free")
    print(f"unpacking {archive}, {size / 1e9:.1f} GB, once; its MD5 sum is checked first", flush=True)
    if part == "train":
        parse_train_archive(scratch, str(archive))
    else:
        parse_devkit_archive(scratch, str(root / ARCHIVES["devkit"]))
        parse_val_archive(scratch, str(archive), load_meta_file(scratch)[1])

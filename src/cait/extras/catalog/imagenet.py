"""ImageNet as it is downloaded: unpack the ILSVRC2012 archives into class folders, once."""

from __future__ import annotations

import os
from pathlib import Path

from torchvision.datasets import ImageNet

from cait import disk
from cait.errors import UserError, one_line

SPLITS = ("train", "val")


def unpack(root: Path) -> None:
    """Unpack the archives in `root` into `root/{train,val}/<wnid>/*.JPEG`, with torchvision.

    A folder appears by one rename, so it is whole or absent; the next call removes what a killed one has left. One
    process unpacks and all others wait. torchvision checks the MD5 sums of the published files first. The archives
    stay; the folders need as much space again, 155 GB.

    Raises:
        UserError: an archive is missing or is not the published file, or the disk is full.
    """
    if all((root / split).is_dir() for split in SPLITS):
        return
    with disk.file_lock(root / ".unpacking.lock"):
        for split in SPLITS:
            if not (root / split).is_dir():
                _unpack_whole(root.absolute(), split)


def _unpack_whole(root: Path, split: str) -> None:
    """Unpack one split in a folder beside it, which holds links to the archives, and rename it at the end."""
    scratch = root / ".unpacking"
    disk.remove(scratch)
    print(f"unpacking ImageNet's {split} images in {root}, once; the MD5 sum is checked first", flush=True)
    try:
        scratch.mkdir()
        for archive in root.glob("ILSVRC2012_*.tar*"):
            (scratch / archive.name).symlink_to(archive)
        ImageNet(scratch, split)
        os.sync()  # the images must be on disk before the name that marks them complete
        (scratch / split).rename(root / split)
    except Exception as error:  # torchvision's, tarfile's, the disk's
        raise UserError(f"cannot unpack ImageNet in {root}: {one_line(error)}") from error
    finally:
        disk.remove(scratch)

"""The images of a folder with their classes, if it has any."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cait.data.folder import FolderSource, Splits, folder_names, list_classes, not_listed, scan_flat
from cait.data.listing import Files
from cait.file_lock import tell


@dataclass(frozen=True)
class Listed:
    """The images of a folder.

    Args:
        files: those to train on come first. The label is the index of the class, -1 without classes.
        class_names: sorted; empty without classes.
        training: how many of the images are to train on, if the rest are to validate on; None if the folder does not
            say.
    """

    root: Path
    files: Files
    class_names: list[str]
    training: int | None = None

    def names(self) -> list[str]:
        """The paths of the images below the folder."""
        return [os.path.relpath(path, self.root) for path, _ in self.files]


def listed(root: Path, hold_out: bool) -> Listed:
    """The images of class folders, of train and val folders with these, or of any folder.

    Args:
        hold_out: divide the images of class folders as a run does: a tenth of each class comes last.

    Raises:
        UserError: there is no such folder, or no image in it; or it cannot be divided.
    """
    source = FolderSource(Splits(root=str(root)))
    if not root.is_dir() or not (hold_out or _has_classes(source)):
        return Listed(root, scan_flat(root), [])
    names, training = source.class_names, None
    if source.holds_out and not hold_out:
        files = list_classes(root, names)
    else:
        files, training = Files([*source.train, *source.val]), len(source.train)
    if left_out := source.left_out or files.left_out:
        tell(f"{root}{not_listed(left_out)}")
    return Listed(root, files, names, training)


def _has_classes(source: FolderSource) -> bool:
    """Whether two or more folders lie where those of the classes would."""
    return len(folder_names(source.split_folders()[0])) > 1

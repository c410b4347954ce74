"""Labels in a table, several per image, a test split, folds, and groups that stay whole.

--data.labels FILE.csv, --data.folds K, --data.group_by REGEX.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from cait.errors import UserError
from cait.settings import Group, In, Settings, group, values


@dataclass(frozen=True)
class Annotations(Group):
    """Labels that no folder says, and folds. Raises UserError if a number is out of range."""

    labels: str | None = None
    """CSV file with the columns `path`, of images below `root`, and `label`, in place of class folders. If it has a
    column `split`, that is train, val or test; what is in `test` neither trains nor chooses the best checkpoint, and
    `cait eval` scores it apart. Images that have the same value in a column `group` are not divided by `folds`, nor
    where validation images are held out."""
    multi_label: bool = False
    """An image may have any number of classes, parted by ";" in the column `label`; ";" alone means none. The loss
    becomes a binary cross entropy, and best.ckpt is chosen by val/mAP."""
    folds: Annotated[int | None, In("[2, inf)")] = None
    """Divide the images that train and validate into so many folds, by scikit-learn's StratifiedKFold, or with groups
    its StratifiedGroupKFold. Then `fold` validates and the others train."""
    fold: int = 0
    """The fold that validates, from 0 on."""
    group_by: str | None = None
    """Regular expression that finds the group of an image, as a scene or a patient, in its path below `root`: it is
    what the first pair of parentheses matches. As a column `group` of `labels`, which it replaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            if self.group_by is not None and not re.compile(self.group_by).groups:
                raise UserError(
                    f"data.group_by {self.group_by}: put what names the group in parentheses"
                )
        except re.error as error:
            raise UserError(
                f"data.group_by {self.group_by} is no regular expression: {error}"
            ) from error
        if self.multi_label and self.labels is None:
            raise UserError(
                "data.multi_label reads the classes of images from a table: name it with data.labels"
            )
        if not 0 <= self.fold < (self.folds or 1):
            raise UserError(
                f"data.fold must be from 0 to data.folds - 1, got {self.fold} of {self.folds} folds"
            )


GROUPS = {"data": "cait.extras.annotations:Annotations"}
MULTI_LABEL = "multi_label"
TASKS = {MULTI_LABEL: "cait.extras.annotations.multi_label:MultiLabel"}


def open_source(root: str, settings: Settings) -> Any:
    """The images of a folder with labels of a table, folds or groups; None if nothing of this is asked for.

    Raises UserError if `root` is no folder of images.
    """
    asked = group(Annotations, settings)
    if asked.labels is None and asked.folds is None and asked.group_by is None:
        return None
    from cait.data import source
    from cait.data.folder import FolderSource
    from cait.extras.annotations.source import AnnotatedSource

    ours = {"root", "val_list", *values(asked)}
    images = source.open_source(
        root, **{name: value for name, value in settings.items() if name not in ours}
    )
    if not isinstance(images, FolderSource):
        raise UserError(
            f"data.labels, data.folds and data.group_by are for folders of images, and {root} is none"
        )
    return AnnotatedSource(images, settings.get("val_list"), asked)

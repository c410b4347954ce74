"""Images that cannot be read: listed in a file, and too many of them end the run."""

from __future__ import annotations

import csv
from pathlib import Path

from cait.disk import TABLE
from cait.errors import UserError


class UnreadableImageError(UserError):
    """An image cannot be read. In training another stands in for it, in validation it is left out."""


class UnreadableImages:
    """The images that could not be read, shared by all loader processes through a file.

    Args:
        path: CSV file of image and reason, to which every process appends; None keeps no file.
        limit: how many images may be unreadable before the run fails.
    """

    def __init__(self, path: Path | None, limit: int) -> None:
        self.path, self.limit = path, limit
        self.seen: set[str] = set()
        """Names of the unreadable images that this process has met."""

    def note(self, image: str, reason: str) -> None:
        """Note an image once.

        Raises:
            UserError: there are more than `limit`.
        """
        if image in self.seen:
            return
        self.seen.add(image)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One short write in append mode, so that processes do not write into each other's lines.
            with self.path.open("a", **TABLE) as file:
                csv.writer(file).writerow([image, reason])
        if len(self.seen) > self.limit:
            self._fail(len(self.seen), reason)

    def read(self) -> dict[str, str]:
        """Reason by image, from all processes and from earlier parts of the run."""
        if self.path is None or not self.path.is_file():
            return {}
        with self.path.open(**TABLE) as file:
            return {row[0]: row[1] for row in csv.reader(file) if len(row) == 2}

    def check(self) -> int:
        """Number of images that all processes have noted so far; this process notes none of them again.

        Raises:
            UserError: there are more than `limit`.
        """
        reasons = self.read()
        self.seen.update(reasons)  # workers that are started later inherit this, as those of a resumed run
        if len(reasons) > self.limit:
            self._fail(len(reasons), next(iter(reasons.values())))
        return len(reasons)

    def _fail(self, count: int, reason: str) -> None:
        where = f"; they are listed in {self.path}" if self.path else ""
        raise UserError(
            f"{count} images cannot be read, {self.limit} are allowed (data.max_bad_share): {reason}{where}"
        )

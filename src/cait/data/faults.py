"""Pictures that cannot be read: noted in a file, and too many of them end the run."""

from __future__ import annotations

import csv
from pathlib import Path

from cait.errors import UserError


class Faults:
    """The pictures that could not be read, shared by all loader processes through a file.

    Args:
        path: CSV file of picture and reason, which every process appends to; None keeps no file.
        limit: number of pictures past which a run fails.
    """

    def __init__(self, path: Path | None, limit: int) -> None:
        self.path, self.limit = path, limit
        self._seen: set[str] = set()  # by this process

    def note(self, picture: str, reason: str) -> None:
        """Note a picture once.

        Raises:
            UserError: more than `limit` of them.
        """
        if picture in self._seen:
            return
        self._seen.add(picture)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One short write in append mode, so that processes do not write into each other's lines.
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow([picture, reason])
        if len(self._seen) > self.limit:
            self._fail(len(self._seen), reason)

    def read(self) -> dict[str, str]:
        """Reason by picture, of all processes and of earlier parts of the run."""
        if self.path is None or not self.path.is_file():
            return {}
        with self.path.open(newline="") as file:
            return {row[0]: row[1] for row in csv.reader(file) if len(row) == 2}

    def check(self) -> int:
        """Number of pictures noted so far by all processes.

        Raises:
            UserError: more than `limit` of them.
        """
        faults = self.read()
        if len(faults) > self.limit:
            self._fail(len(faults), next(iter(faults.values())))
        return len(faults)

    def _fail(self, count: int, reason: str) -> None:
        where = f"; they are listed in {self.path}" if self.path else ""
        raise UserError(
            f"{count} pictures cannot be read, {self.limit} are allowed (data.max_bad_share): {reason}{where}"
        )

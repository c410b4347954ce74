#!/usr/bin/env python3
"""Print the notes of the release with a tag, from CHANGELOG.md: `scripts/release.py v0.1.0`.

A tag that is not the version, or a date that CHANGELOG.md and CITATION.cff do not share, ends it in one line.
"""

import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def notes(root: Path, tag: str) -> str:
    """The section of CHANGELOG.md; SystemExit if the files of the repository do not belong to the tag."""
    (source,) = (root / "src").glob("*/__init__.py")
    version = found(source, r'^__version__ = "(.+)"$')
    if tag != f"v{version}":
        raise SystemExit(
            f"release: the tag is {tag}, the version of {source.relative_to(root)} is {version}"
        )
    heading = rf"^## \[{re.escape(version)}\] - "
    date = found(root / "CHANGELOG.md", rf"{heading}(\d{{4}}-\d\d-\d\d)$")
    citation = root / "CITATION.cff"
    cited = found(citation, r"^version: (\S+)$"), found(citation, r"^date-released: (\S+)$")
    if cited != (version, date):
        raise SystemExit(
            f"release: CITATION.cff has {' of '.join(cited)}, CHANGELOG.md {version} of {date}"
        )
    return found(root / "CHANGELOG.md", rf"(?s){heading}\S+\n+(.*?)(?=^## |\Z)").rstrip()


def found(path: Path, pattern: str) -> str:
    """What the group of a pattern matches in a file; SystemExit if nothing does."""
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if not match:
        raise SystemExit(f"release: {path.name} has no line {pattern}")
    return match[1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("release: give the tag, as v0.1.0")
    print(notes(REPO, sys.argv[1]))

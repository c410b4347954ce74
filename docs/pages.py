"""The pages of this repository, and the fenced blocks in them."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    """A fenced block: its page and line, its language, the words after that, its text."""

    place: str
    language: str
    words: dict[str, str]
    text: str
    follows: bool
    """Whether nothing stands between it and the block before."""

    @property
    def commands(self) -> list[str]:
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        return [
            re.sub(r"\s+#.*", "", line).strip()
            for line in lines
            if line.strip() and not line.startswith("#")
        ]


def pages() -> list[Path]:
    """The pages whose commands are run, those of extras and contrib last: each one's is the README.md in its folder."""
    folders = [
        REPO / "docs",
        REPO / "docs/decisions",
        *sorted((REPO / "src/cait/extras").iterdir()),
        *sorted(REPO.glob("contrib/*")),
    ]
    return [
        REPO / "README.md",
        *(page for folder in folders for page in sorted(folder.glob("*.md"))),
    ]


def blocks(wanted: Sequence[Path]) -> Iterator[Block]:
    """The fenced blocks of these pages."""
    for page in wanted:
        text, end = page.read_text(), 0
        for found in re.finditer(r"^( *)```(\w+)(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
            indent, language, words, body = found.groups()
            place = f"{page.relative_to(REPO)}:{text.count(chr(10), 0, found.start()) + 1}"
            body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
            follows = not text[end : found.start()].strip()
            yield Block(
                place, language, dict(word.split("=", 1) for word in words.split()), body, follows
            )
            end = found.end()


def working_tree() -> list[Path]:
    """The files that git tracks or would track, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, capture_output=True
    )
    names = filter(None, os.fsdecode(listed.stdout).split("\0"))
    return [Path(name) for name in names if (REPO / name).is_file()]

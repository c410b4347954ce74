"""Take what is gone out of pages: sentences, items, rows, commands and sections that speak of it."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

BLOCK = re.compile(r"^```.*?^```$|(?:^(?!```)[^\n]+\n?)+", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def prune(pages: Sequence[Path], gone: re.Pattern[str]) -> None:
    """Rewrite the pages without what `gone` finds and without links that lead nowhere."""
    changed = True
    while changed:  # a section that goes may have been linked to
        changed = False
        for page in pages:
            text = page.read_text()
            left = pruned(text, lambda part, page=page: bool(gone.search(part)) or is_dead(part, page))  # type: ignore[misc]
            if left != text:
                page.write_text(left)
                changed = True


def is_dead(text: str, page: Path) -> bool:
    """Whether a link in the text leads nowhere."""
    for name, anchor in LINK.findall(text):
        target = Path(os.path.normpath(page.parent / name)) if name else page
        if not name.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            return True
    return False


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def pruned(text: str, is_gone: Callable[[str], bool]) -> str:
    """A page without what is gone, and without headings over nothing."""
    kept, fell = list[str](), False
    for block in BLOCK.findall(text):
        if block.startswith("```text") and fell:  # what the commands printed
            continue
        found = _left(block.rstrip("\n"), is_gone)
        fell = block.startswith("```") and not found
        if fell and kept and kept[-1].endswith(":"):
            kept[-1] = " ".join(_sentences(kept[-1])[:-1])
        kept.append(found)
    kept = [block for block in kept if block]
    for i in reversed(range(1, len(kept))):
        level, below = (re.match(r"#+(?= )|$", block) for block in (kept[i], [*kept, "# "][i + 1]))
        if level and level[0] and below and 0 < len(below[0]) <= len(level[0]):
            del kept[i]
    return "\n\n".join(kept) + "\n"


def _left(block: str, is_gone: Callable[[str], bool]) -> str:
    """What is left of a fence of commands, a table, a list or a paragraph."""
    if block.startswith(("```bash", "```sh")):
        first, *lines, last = block.replace("\\\n", "\0").splitlines()
        lines = [line for line in lines if not is_gone(line)]
        return "\n".join([first, *lines, last]).replace("\0", "\\\n") if any(lines) else ""
    if block.startswith("|"):
        rows = block.splitlines()
        rows[2:] = [row for row in rows[2:] if not is_gone(row)]
        return "\n".join(rows) if rows[2:] else ""
    if block.startswith(("```", "#", "<")):
        return block
    return "\n".join(filter(None, (_item(item, is_gone) for item in re.split(r"\n(?=- |\d+\. )", block))))


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=\S)", text)


def _item(item: str, is_gone: Callable[[str], bool]) -> str:
    """A paragraph or an item of a list without its sentences that are gone, in lines anew if there are any."""
    start, text = re.findall(r"(?s)^(- |\d+\. |)(.*)$", item)[0]
    parts = [" ".join(part.split()) for part in _sentences(text)]
    left = [part for part in parts if not is_gone(part)]
    if left == parts or not left:
        return item if left else ""
    wide = textwrap.TextWrapper(120, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False)
    return wide.fill(start + " ".join(left))

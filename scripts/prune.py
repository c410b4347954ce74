"""Take what is gone out of pages: sentences, items, rows, commands and sections that speak of it."""

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
            left = pruned(
                text, lambda part, page=page: bool(gone.search(part)) or is_dead(part, page)
            )  # type: ignore[misc]
            if left != text:
                page.write_text(left)
                changed = True


def is_dead(text: str, page: Path) -> bool:
    """Whether a link in the text leads nowhere."""
    for name, anchor in LINK.findall(text):
        target = Path(os.path.normpath(page.parent / name)) if name else page
        if not name.startswith("http") and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            return True
    return False


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def pruned(text: str, is_gone: Callable[[str], bool]) -> str:
    """A page without what is gone: without headings over nothing, and sections whose first commands are gone."""
    kept, fell, commands, gone_from = list[str](), False, True, 0
    for block in BLOCK.findall(text):
        level = _level(block)
        if gone_from and not 0 < level <= gone_from:
            continue
        gone_from = 0
        if level:
            while kept and _level(kept[-1]) >= max(level, 2):
                kept.pop()
            commands = level == 1
        elif block.startswith("```text") and fell:  # what the commands printed
            continue
        found = _left(block.rstrip("\n"), is_gone)
        fell = block.startswith("```") and not found
        if fell and not commands:
            while not (gone_from := _level(kept.pop())):
                pass
            continue
        if fell and kept[-1].endswith(":"):
            kept[-1] = " ".join(_sentences(kept[-1])[:-1])
        commands |= block.startswith("```bash") and not fell
        kept += [found] if found else []
    while _level(kept[-1]) > 1:
        kept.pop()
    return "\n\n".join(filter(None, kept)) + "\n"


def _level(block: str) -> int:
    """Of a heading; 0 for any other block."""
    found = re.match("#+(?= )", block)
    return len(found[0]) if found else 0


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
    return "\n".join(
        filter(None, (_item(item, is_gone) for item in re.split(r"\n(?=- |\d+\. )", block)))
    )


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=\S)", text)


def _item(item: str, is_gone: Callable[[str], bool]) -> str:
    """A paragraph or an item of a list without its sentences that are gone, in lines anew if there are any."""
    start, text = re.findall(r"(?s)^(- |\d+\. |)(.*)$", item)[0]
    parts = [" ".join(part.split()) for part in _sentences(text)]
    left = [part for part in parts if not is_gone(part)]
    if left == parts or not left:
        return item if left else ""
    wide = textwrap.TextWrapper(
        120, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
    )
    return wide.fill(start + " ".join(left))

"""Names and times as screens and pages show them, and values of others in each language that is written."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cait.errors import printable
from cait.model.config import VARIANTS
from cait.settings import Settings

MARKUP = re.compile(r"[\\`*_{}\[\]<>|#&~@$]|:(?=//)|(?<=www)\.")
"""What Markdown may take for markup; addresses are links too."""


def _in_markdown(value: Any) -> str:
    words = " ".join(str(value).split())
    return MARKUP.sub(r"\\\g<0>", "".join(filter(str.isprintable, words)))


def _in_html(value: Any) -> str:
    return html.escape(printable(str(value)))


def _in_json(value: Any) -> str:
    """JSON, and so YAML, that may stand in a page or a block of Markdown too."""
    text = json.dumps(value, default=str)
    return re.sub("[<>&`\x7f]", lambda letter: f"\\u{ord(letter[0]):04x}", text)


LANGUAGES: dict[str, Callable[[Any], str]] = {
    "html": _in_html,
    "json": _in_json,
    "markdown": _in_markdown,
    "python": lambda value: ascii(value).replace("`", r"\x60"),
    "terminal": lambda value: printable(str(value)),
}
"""How a value is written within each language, on one line."""


def written(value: Any, language: str) -> str:
    """A value of others as one in `LANGUAGES`: it ends no text, line, block or page, and begins nothing."""
    return LANGUAGES[language](value)


def network_name(name: str, fields: Settings | None = None) -> str:
    """A network by its settings `model.name` and `model.fields`: "xxs24", "CaiT 6×96", "timm/vit_small_patch16_224".

    A CaiT has the name of the paper's model with its depth and width; if there is none, it is "CaiT depth×width".
    """
    if name not in VARIANTS:
        return name
    settings = VARIANTS[name] | (fields or {})
    depth = settings["depth"]
    width = settings["embed_dim"]
    for variant, row in VARIANTS.items():
        if (row["depth"], row["embed_dim"]) == (depth, width):
            return variant
    return f"CaiT {depth}×{width}"


def root_name(root: str) -> str:
    """A data set's root in one spelling: `DIR/`, as a shell completes it, is `DIR`."""
    return root.rstrip("/") if "://" in root else str(Path(root))


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 5 s", "3 h 4 min" or "5 d 6 h"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

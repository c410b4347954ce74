"""One HTML page that holds everything itself: no script, no request, light and dark."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from cait import disk

PIXELS_PER_INCH = 96
"""Of CSS."""
COLUMN, ROW = 350, 1088
"""Pixels of the narrowest column, beyond which a figure takes a row of its own, and of the row; as in page.html."""
RULES = (
    ".w{width} img {{ min-width: {width}px; max-width: {widest}px; }} "
    "@media (max-width: {too_narrow}px) {{ .w{width} .hint {{ display: block; }} }}"
)
"""CSS of the figures of a width: they grow a little, and they scroll on a screen that is narrower with its padding."""
GREY = "#7d7d7d"
"""Text colour of a figure without a background, readable on white and on black."""


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str]]) -> str:
    """The page: a title, a list of facts in words, then the sections, each of a heading and HTML."""
    anchors = [heading.lower().replace(" ", "-") for heading, _ in sections]
    parts = ["<dl>", *(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts), "</dl>\n<nav>"]
    for anchor, (heading, _) in zip(anchors, sections, strict=True):
        parts.append(f'<a href="#{anchor}">{escape(heading)}</a>')
    parts.append("</nav>")
    for anchor, (heading, html) in zip(anchors, sections, strict=True):
        parts.append(f'\n<h2 id="{anchor}">{escape(heading)}</h2>\n{html}')
    html = "".join(parts)
    widths = sorted({int(width) for width in re.findall(r'<div class="figure w(\d+)', html)})
    rules = [
        RULES.format(width=width, widest=int(1.5 * width), too_narrow=width + 31 if width <= ROW else 10**6)
        for width in widths
    ]
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=html, scrolls="\n".join(rules))


def write(path: Path, title: str, facts: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str]]) -> None:
    """Write the page whole."""
    html = page(title, facts, sections)
    with disk.whole(path) as beside:
        beside.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")  # file names may be no text


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose last column holds numbers."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def tiles(images: Iterable[tuple[np.ndarray, str, str]]) -> str:
    """A grid of images uint8 [S, S, 3], each with a title and a caption."""
    parts = []
    for pixels, title, caption in images:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=92, subsampling=0)
        words = f"<figcaption><b>{escape(title)}</b><br>{escape(caption)}</figcaption>"
        parts.append(f"<figure>{_image(out, 'jpeg', title)}{words}</figure>")
    return f'<div class="grid">{"".join(parts)}</div>'


def embed(figure: Figure, description: str) -> str:
    """A figure in its own size without its background, its black text in a grey that suits light and dark.

    On a screen that is narrower it scrolls sideways, and a line above it says so.
    """
    for text in figure.findobj(Text):
        if text.get_color() == mpl.rcParams["text.color"]:
            text.set_color(GREY)
    for axes in figure.axes:
        axes.tick_params(colors=GREY)
        axes.spines[:].set_edgecolor(GREY)
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True, dpi=144)
    width = round(PIXELS_PER_INCH * figure.get_figwidth())
    hint = '<p class="hint">Scroll sideways to see the rest →</p>'
    image = f'<div class="scroll" tabindex="0">{_image(out, "png", description, width)}</div>'
    return f'<div class="figure w{width}{" row" * (width > COLUMN)}">{hint}{image}</div>'


def beside(*parts: str) -> str:
    """Parts side by side, below each other on a narrow screen."""
    return f'<div class="beside">{"".join(parts)}</div>'


def _image(content: io.BytesIO, kind: str, description: str, width: int | None = None) -> str:
    data = base64.b64encode(content.getvalue()).decode()
    size = f' width="{width}"' if width else ""
    return f'<img src="data:image/{kind};base64,{data}" alt="{escape(description)}"{size}>'

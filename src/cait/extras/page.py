"""One HTML page that holds everything itself: no script, no request, light and dark."""

import base64
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from cait import disk
from cait.extras.display import written

MOST_PAIRS = 15
"""Rows of a table of pairs."""


def write(
    path: Path, title: str, facts: Iterable[tuple[str, str]], sections: Iterable[tuple[str, str]]
) -> None:
    """Write a page whole: a title, a list of facts in words, then the sections, each of a heading and HTML."""
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(title),
        facts="".join(
            f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in facts
        ),
        sections="".join(
            f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.atomic_write(path) as beside:
        # file names may be no text
        beside.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")


def escape(text: str) -> str:
    """A text in HTML, without marks that turn the direction of writing."""
    return written(text, "html")


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose last column holds numbers."""
    lines = "".join(_row("td", row) for row in rows)
    return f"<table>{_row('th', head)}{lines}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    html = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{html}</tr>"


def most_common(first: str, second: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of the most frequent pairs, with a title for each side, and the images that have each pair."""
    rows = [(*pair, f"{count:,}") for pair, count in Counter(pairs).most_common(MOST_PAIRS)]
    return table((first, second, "images"), rows)


def tiles(images: Iterable[tuple[np.ndarray, str, str]]) -> str:
    """A grid of images uint8 [S, S, 3], each with a title and a caption."""
    html = ""
    for pixels, title, caption in images:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=92, subsampling=0)
        words = f"<b>{escape(title)}</b><br>{escape(caption)}"
        html += f"<figure>{_image(out, 'jpeg', title)}<figcaption>{words}</figcaption></figure>"
    return f'<div class="grid">{html}</div>'


def embed(figure: Figure, description: str) -> str:
    """A figure, no wider than the screen."""
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return _image(out, "png", description)


def _image(content: io.BytesIO, format: str, description: str) -> str:
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img src="data:image/{format};base64,{data}" alt="{escape(description)}">'

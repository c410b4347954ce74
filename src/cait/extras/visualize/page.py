"""One HTML page that holds everything itself: no script, no request, light and dark."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

GREY = "#7d7d7d"
"""Text colour of a figure without a background, readable on white and on black."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1a1a1a; --soft: #666; --line: #ddd; --back: #fff; --bar: #56b4e9; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6e6e6; --soft: #999; --line: #333; --back: #111418; --bar: #0072b2; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1100px; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }} h3 {{ font-size: 1rem; margin: 2rem 0 .5rem; }}
a {{ color: inherit; }} nav a {{ margin-right: 1rem; }}
p, figcaption, dt {{ color: var(--soft); }}
img {{ display: block; max-width: 100%; height: auto; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }} dd {{ margin: 0; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }} td.number, th.number {{ text-align: right; }}
.wide {{ overflow-x: auto; }} .wide img {{ min-width: 640px; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 1rem; }}
.grid figure {{ margin: 0; font-size: .85rem; }} .grid img {{ width: 100%; image-rendering: pixelated; }}
.grid figcaption b {{ color: var(--text); }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title: str, facts: Sequence[tuple[str, str]], sections: Iterable[tuple[str, str]]) -> str:
    """The page: a title, a list of facts in words, then the sections, each of a heading and HTML."""
    given = list(sections)
    links = "".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a>' for heading, _ in given)
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    parts = [f"<dl>{listed}</dl>", f"<nav>{links}</nav>"]
    parts += [f'<h2 id="{_anchor(heading)}">{escape(heading)}</h2>\n{html}' for heading, html in given]
    return PAGE.format(title=escape(title), body="\n".join(parts))


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose last column holds numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        *words, number = (escape(cell) for cell in cells)
        return (
            "<tr>"
            + "".join(f"<{tag}>{cell}</{tag}>" for cell in words)
            + f'<{tag} class="number">{number}</{tag}></tr>'
        )

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def wide(html: str) -> str:
    """HTML that scrolls sideways on a narrow screen."""
    return f'<div class="wide" tabindex="0">{html}</div>'


def tiles(images: Iterable[tuple[np.ndarray, str, str]]) -> str:
    """A grid of images uint8 [S, S, 3], each with a title and a caption."""
    return f'<div class="grid">{"".join(_tile(*image) for image in images)}</div>'


def _tile(pixels: np.ndarray, title: str, caption: str) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=92, subsampling=0)
    caption = f"<figcaption><b>{escape(title)}</b><br>{escape(caption)}</figcaption>"
    return f"<figure>{_image(out.getvalue(), 'jpeg', title)}{caption}</figure>"


def embed(figure: Figure, description: str) -> str:
    """A figure without its background, its black text in a grey that suits light and dark."""
    for text in figure.findobj(Text):
        if text.get_color() == mpl.rcParams["text.color"]:
            text.set_color(GREY)
    for axes in figure.axes:
        axes.tick_params(colors=GREY)
        axes.spines[:].set_edgecolor(GREY)
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True, dpi=144)
    return _image(out.getvalue(), "png", description)


def _image(content: bytes, kind: str, description: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<img src="data:image/{kind};base64,{data}" alt="{escape(description)}">'

"""The pages as a site with search: `make docs` copies README.md, docs/, and the pages of extras and contrib into
.site/pages, writes the reference of all settings from the code, and builds .site/html with Zensical."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from latex2mathml.converter import convert
from pages import REPO, working_tree

SITE = REPO / ".site"
PAGES = SITE / "pages"
LINK = re.compile(r"(\]\()([^)#:]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
EQUATION = re.compile(r"^\$\$(.*?)\$\$$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^  (?:-\w \w+, )?--([\w.]+)[^\n]*?(?:  +|\n {24})(\S[^\n]*)$", re.MULTILINE)
TYPE = re.compile(
    r" *\((?:required, )?type: (.*?)(?:, default: (.*?))?(?:, known subclasses: .*)?\)$"
)


def page(path: Path, known: set[Path]) -> str:
    """The text of a page, its equations as MathML, its fences without the words that GitHub does not show.

    Links to folders go to the page or the code that they hold.
    """

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / found[2]))
        for name in ("README.md", "__init__.py"):
            if target / name in known:
                return f"{found[1]}{found[2].rstrip('/')}/{name}{found[3]}"
        return found[0]

    text = LINK.sub(link, FENCE.sub(r"\1", (REPO / path).read_text()))
    return EQUATION.sub(
        lambda found: (
            f'<div style="overflow: auto hidden; padding: .3em 0">{convert(found[1].strip(), "block")}</div>'
        ),
        text,
    )


def linked(path: Path, text: str) -> Iterator[Path]:
    """The files that a page links to or shows."""
    for target in re.findall(r'(?:\]\(|(?:src|srcset)=")([^)#":]+)', text):
        yield Path(os.path.normpath(path.parent / target))


def settings() -> str:
    """All settings of `cait fit`, a table for each group: name, default, meaning."""
    wide = os.environ | {"COLUMNS": "100000"}
    command = [sys.executable, "-m", "cait", "fit", "--help"]
    shown = subprocess.run(
        command, cwd=REPO, env=wide, capture_output=True, text=True, check=True
    ).stdout
    groups = re.split(r"^([A-Z][^\n]*):$", shown.split("options:\n", 1)[1], flags=re.MULTILINE)
    lines = [
        "# All settings of `cait fit`",
        "",
        "Each can stand in a YAML file or on the command line.",
    ]
    for title, text in zip(["The run", *groups[1::2]], groups[0::2], strict=True):
        rows = [
            row(name, told) for name, told in OPTION.findall(text) if not name.endswith(".help")
        ]
        lines += (
            ["", f"## {title}", "", "| setting | type | default | |", "|---|---|---|---|", *rows]
            if rows
            else []
        )
    return "\n".join(lines) + "\n"


def row(name: str, told: str) -> str:
    """A setting as a row of a table, from what --help tells of it."""
    found = TYPE.search(told)
    kind, default = found.groups("") if found else ("", "")
    cells = [f"`--{name}`", kind, f"`{default}`" if default else "", TYPE.sub("", told)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    known = set(working_tree())
    pages = {
        path: page(path, known)
        for path in known
        if path.suffix == ".md" and not {"tests", "scripts"} & {*path.parts}
    }
    for path, text in pages.items():
        for target in {path, *linked(path, text)} & known:
            (PAGES / target).parent.mkdir(parents=True, exist_ok=True)
            if target not in pages:
                shutil.copyfile(REPO / target, PAGES / target)
        (PAGES / path).write_text(text)
    (PAGES / "docs/settings.md").write_text(settings())
    shutil.copyfile(REPO / "docs/site.toml", SITE / "zensical.toml")
    raise SystemExit(
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=SITE).returncode
    )


if __name__ == "__main__":
    main()

"""Draw what a command prints as an SVG file: `make train 2>&1 | python docs/picture.py docs/train.svg`."""

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

EPOCH = re.compile(r"epoch (\d+)/(\d+)")


def is_shown(line: str) -> bool:
    """All lines but the epochs in the middle."""
    epoch = EPOCH.match(line)
    return not epoch or int(epoch[1]) < 4 or int(epoch[1]) > int(epoch[2]) - 3


def main() -> None:
    lines = ["$ make train", *sys.stdin.read().splitlines()]
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=120, file=nowhere, force_terminal=True)
        for before, line in zip(["", *lines], lines, strict=False):
            if is_shown(line):
                console.print(Text.from_ansi(line), overflow="crop", no_wrap=True)
            elif is_shown(before):
                console.print(Text("..."))
    Path(sys.argv[1]).write_text(console.export_svg(title="make train"))


if __name__ == "__main__":
    main()

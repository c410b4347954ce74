"""Run the commands of README.md, docs/, extras and contrib in a scratch copy of the working tree: `make docs-check`.

A fenced block of `bash` holds commands. The words after `bash`, which GitHub does not show, say more:

    ```bash                       run each command; training is cut to a few steps
    ```bash skip=needs-a-gpu      do not run them, for this reason; parse what can be parsed
    ```bash small=DIR             run each command on what stands in for the reader's own, see docs/stand_ins.py
    ```bash epochs=7              training ends after so many epochs
    ```bash fails=2               each command must end with this exit code
    ```sh                         leave them to a test of the page, as tests/system/test_extending.py
    ```python file=my_net.py      write the block to a file for the commands that follow

A skipped `make train` or `cait fit` is parsed with --print_config, which reads no data: every setting must exist.
A block of `text` right after commands that run is a sample of what they print: how many of its lines they print, but
for the numbers, is said. The cells of docs/*.ipynb run too.

`docs/check.py --notebooks` runs only the notebooks, and writes them into docs/ with their outputs; one with the name of
a page is that page. `docs/check.py --write` trains to the end and writes the numbers of the samples, of all pages or of
those that are named, say `--write README.md`.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from pages import REPO, blocks, pages, working_tree
from stand_ins import CUT, make_all

FEW_STEPS = "--trainer.limit_train_batches 10 --trainer.limit_val_batches 4 --trainer.max_epochs"
EPOCHS = {"train": 1, "fit": 1, "resume": 2}
NOTEBOOKS = [path.relative_to(REPO) for path in sorted((REPO / "docs").glob("*.ipynb"))]
PAGES_AS_NOTEBOOKS = [
    path.with_suffix(".md") for path in NOTEBOOKS if (REPO / path).with_suffix(".md").exists()
]
LIMIT = 900
"""Seconds for one command."""


def few_steps(command: str, words: dict[str, str]) -> str:
    """`command`, of a block with these words; if it trains, for a few steps alone."""
    verb = re.match(r"(?:make|\S*cait) (\w+)", command)
    if "small" in words and verb and verb[1] == "eval":
        return f"{command} {CUT}"
    if not verb or verb[1] not in EPOCHS:
        return command
    options = f"{FEW_STEPS} {words.get('epochs', EPOCHS[verb[1]])}"
    if "small" in words:
        options = f"{options} {CUT}"
    if not command.startswith("make"):
        return f"{command} {options}"
    command, given = re.subn(r'ARGS="(.*)"', lambda found: f'ARGS="{found[1]} {options}"', command)
    return command if given else f'{command} ARGS="{options}"'


def parse(command: str) -> str:
    """Parse a command that is not run, and say how; "not parsed" if nothing here can.

    Raises:
        ValueError: the command is wrong, with what was printed.
    """
    how = "not parsed"
    if command.startswith("make "):
        done = subprocess.run(
            ["bash", "-c", f"make -n {command[5:]}"], capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(done.stderr)
        command, how = done.stdout, "target exists"
    found = re.search(r"\bcait ((?:fit|eval --config|eval --paper) [^;|&\n]*)", command)
    # without a file the recipe looks at the folder, which is not here
    if not found or not re.search("--config|--paper", found[1]):
        return how
    from cait.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main([*shlex.split(found[1]), "--print_config"])
        except SystemExit as stop:
            if stop.code:
                raise ValueError(printed.getvalue()) from stop
    return "settings parsed"


def run(command: str, status: int = 0) -> str:
    """Run a command and return what it prints. Raises ValueError with that if it ends with another exit code."""
    done = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode != status:
        raise ValueError(f"exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def nearness(a: str, b: str) -> tuple[bool, float]:
    """Whether two lines begin with the same word, and how alike they are."""
    first, other = (re.findall(r"\w[\w./-]*", line)[:1] for line in (a, b))
    return first == other, SequenceMatcher(None, a, b).ratio()


def as_printed(sample: str, printed: str) -> tuple[str, list[str]]:
    """The sample with the numbers that were printed, and its lines that were not, whatever the numbers."""
    lines, missing, used = [], [], set[int]()
    for line in sample.splitlines():
        parts = [re.escape(part) for part in line.split("...")]
        parts = [re.sub(r"(\\ |─)+", r"[ ─]+", re.sub(r"\d+", r"\\d+", part)) for part in parts]
        alike = re.finditer(
            "^" + ".*?".join(f"({part})" for part in parts) + "$", printed, re.MULTILINE
        )
        # Of the lines that differ in numbers alone the nearest one, each once.
        left = (
            [found for found in alike if found.start() not in used] if line.strip() != "..." else []
        )
        found = max(left, key=lambda found: nearness(line, found[0]), default=None)
        if found:
            used.add(found.start())
            line = "...".join(found.groups())
        elif line.strip() != "...":
            missing.append(line)
        lines.append(line)
    return "".join(f"{line}\n" for line in lines), missing


def execute(path: Path) -> None:
    """Run the cells of a notebook in its folder, and write their outputs into it. Raises ValueError if one fails."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook, place = nbformat.read(path, as_version=4), {"metadata": {"path": path.parent}}
    try:
        NotebookClient(
            notebook, timeout=LIMIT, record_timing=False, coalesce_streams=True, resources=place
        ).execute()
    except CellExecutionError as error:
        raise ValueError(error) from error
    nbformat.write(notebook, path)


def as_notebook(page: Path) -> Path:
    """Write a page as a notebook beside it: its blocks of Python are the cells of code. Returns the notebook's path."""
    from nbformat import v4

    notebook = v4.new_notebook()
    for i, text in enumerate(
        re.split(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    ):
        cell = (
            v4.new_code_cell(text.strip("\n")) if i % 2 else v4.new_markdown_cell(text.strip("\n"))
        )
        cell["id"] = f"cell-{i}"
        notebook.cells.append(cell)
    path = page.with_suffix(".ipynb")
    path.write_text(v4.writes(notebook) + "\n")
    return path


def copy_to(scratch: Path) -> None:
    """Copy the working tree, and link the virtual environment."""
    for path in working_tree():
        (scratch / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / path, scratch / path)
    (scratch / ".venv").mkdir()
    marks = {".ready", ".tools"}
    for entry in (REPO / ".venv").iterdir():
        if entry.name not in marks:
            (scratch / ".venv" / entry.name).symlink_to(entry)
    for mark in marks:
        # its own, newer than pyproject.toml: make must not install from here
        (scratch / ".venv" / mark).touch()


def run_blocks(wanted: Sequence[Path], write: bool) -> dict[str, int]:
    """Run the commands of these pages, and with `write` to their end, and write the numbers of their samples.

    Returns how many ran, were skipped and failed.
    """
    counts, printed, words = dict.fromkeys(("run", "skipped", "failed"), 0), "", dict[str, str]()
    for block in blocks(wanted):
        if "file" in block.words:
            Path(block.words["file"]).parent.mkdir(parents=True, exist_ok=True)
            Path(block.words["file"]).write_text(block.text)
        if block.language == "text" and block.follows and printed:
            sample, missing = as_printed(block.text, printed)
            print(
                f"{block.place}  {len(missing)} lines of the sample were not printed",
                *missing,
                sep="\n    ",
                flush=True,
            )
            page = REPO / block.place.split(":")[0]
            if write and "small" not in words:
                page.write_text(page.read_text().replace(block.text, sample, 1))
        printed, words = "", block.words
        for command in block.commands if block.language == "bash" else ():
            reason, since = block.words.get("skip"), time.monotonic()
            try:
                if reason:
                    kind, how = "skipped", f"skipped, {parse(command)}: {reason}"
                else:
                    # what stands in for other data gives no numbers
                    whole = write and "small" not in block.words
                    shortened = command if whole else few_steps(command, block.words)
                    printed += run(shortened, int(block.words.get("fails", 0)))
                    kind, how = "run", "ok"
            except (ValueError, subprocess.TimeoutExpired) as error:
                kind, how = "failed", f"failed: {error}"
            print(
                f"{block.place}  {time.monotonic() - since:.0f} s  {command}  [{how}]", flush=True
            )
            counts[kind] += 1
    return counts


def run_notebooks(write: bool) -> None:
    """Run all notebooks, and with `write` keep their outputs. Ends the program at the first cell that fails."""
    for page in PAGES_AS_NOTEBOOKS:
        as_notebook(page)
    for notebook in NOTEBOOKS:
        since = time.monotonic()
        try:
            execute(notebook)
        except ValueError as error:
            raise SystemExit(f"{notebook}: failed: {error}") from None
        print(f"{notebook}  {time.monotonic() - since:.0f} s", flush=True)
        if write:
            shutil.copyfile(notebook, REPO / notebook)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--notebooks", action="store_true", help="run only the notebooks, and write their outputs"
    )
    parser.add_argument(
        "--write", nargs="*", type=Path, metavar="PAGE", help="write the numbers of the samples"
    )
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="only these; default all"
    )
    given = parser.parse_args()
    named = [page.resolve() for page in (*given.pages, *(given.write or ()))]
    write = given.write is not None
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(Path(folder, "src"))
        os.environ.pop("CAIT_MAKE", None)  # messages name commands of `cait` to those who typed one
        os.environ["PATH"] = (
            f"{Path(folder, '.venv/bin')}{os.pathsep}{os.environ['PATH']}"  # `cait`, as if activated
        )
        os.environ["HF_HUB_OFFLINE"] = "1"  # a folder without a configuration asks it for weights
        sys.path.insert(0, os.environ["PYTHONPATH"])
        make_all(Path(folder))
        start, counts = time.monotonic(), {"failed": 0}
        if not given.notebooks:
            if named and REPO / "README.md" not in named:
                # the run that the pages are about
                run("make train" if write else few_steps("make train", {}))
            counts = run_blocks(named or pages(), write)
        if not named:
            run_notebooks(write=given.notebooks)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"commands: {told}; {(time.monotonic() - start) / 60:.1f} minutes")
        raise SystemExit(min(counts["failed"], 1))


if __name__ == "__main__":
    main()

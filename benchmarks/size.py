"""How much there is to read: lines, modules and files, and what each extra adds.

    python benchmarks/size.py [--extras | --write]

It prints what `LIMITS` names beside its limit and its goal; `make house` holds the limits. --extras prints the table of
the extras, --write puts it into docs/your_project.md.
"""

import argparse
import ast
import importlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
SOURCE = next((REPO / "src").glob("*/__init__.py")).parent
EXTRAS, CONTRIB = SOURCE / "extras", REPO / "contrib"
TOUR, PAGE = REPO / "docs/tour.md", REPO / "docs/your_project.md"
READ_FIRST = ("model", "data", "train", "run", "cli")
"""The rooms that one reads to know the core."""
MOST_PARAMETERS = 20
BEGIN, END = "<!-- extras, by benchmarks/size.py --write -->", "<!-- end -->"


class Limit(NamedTuple):
    """What the tree keeps to today, and what is wanted. A change may lower a limit; your own project may raise it."""

    reached: int
    goal: int


LIMITS = {
    "lines of model, data, train, run and cli": Limit(7024, 6500),
    "lines of all source without tests": Limit(16149, 12500),
    "lines of its tests": Limit(17770, 12900),
    "lines of contrib without tests": Limit(4469, 3900),
    "lines of contrib's tests": Limit(3945, 3300),
    "kinds of what an extra adds": Limit(13, 12),
    "modules that `fit` of one step loads": Limit(78, 74),
    "of them in the core": Limit(51, 49),
    "files of a batch": Limit(8, 8),
    "lines of a batch": Limit(1978, 1760),
    "files of a step": Limit(8, 8),
    "lines of a step": Limit(1443, 1429),
    "files of a checkpoint and its resume": Limit(14, 13),
    "lines of a checkpoint and its resume": Limit(2763, 2280),
    "file names in two rooms of the core": Limit(0, 0),
    "constructors with more than 20 parameters": Limit(0, 0),
    "scripts in benchmarks": Limit(13, 13),
    "lines of benchmarks": Limit(2745, 2745),
}


def is_test(path: Path) -> bool:
    return path.parent.name == "tests"


def sources(folder: Path | None = None) -> list[Path]:
    """The Python files in a folder of the source, all of it if none is named, without tests."""
    return [path for path in sorted((folder or SOURCE).rglob("*.py")) if not is_test(path)]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def modules_of_fit() -> list[str]:
    """The modules of the package after `fit` has trained a step on the digits, in a process of its own."""
    options = f"fit --config {REPO / 'configs/digits.yaml'} --trainer.accelerator cpu --data.num_workers 0"
    steps = "--trainer.max_steps 1 --trainer.limit_val_batches 1"
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n"
        f"from {SOURCE.name}.cli import main\n"
        f"main({[*options.split(), *steps.split()]!r})\n"
        f"print(*sorted(name for name in sys.modules if name.split('.')[0] == {SOURCE.name!r}))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.splitlines()[-1].split()


def walks() -> dict[str, list[Path]]:
    """The files that each walk of docs/tour.md links to, by the walk's name, in its order."""
    found = {}
    for part in re.split(r"^## ", TOUR.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if name := re.match(r"Follow (.*)", heading):
            links = re.findall(r"\]\((\.\./src/[^)#]+\.py)", text)
            found[name[1]] = list(dict.fromkeys((TOUR.parent / link).resolve() for link in links))
    return found


def names_in_two_rooms() -> list[str]:
    """File names that two rooms of the core have, the ground floor as one of the rooms."""
    core = [path for path in sources() if EXTRAS not in path.parents and path.name != "__init__.py"]
    return sorted(name for name, count in Counter(path.name for path in core).items() if count > 1)


def long_constructors() -> list[str]:
    """Classes whose `__init__` names more than MOST_PARAMETERS; fields of dataclasses stand with their sentences."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            for function in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    arguments = function.args
                    if len([*arguments.args[1:], *arguments.kwonlyargs]) > MOST_PARAMETERS:
                        found.append(f"{path.relative_to(SOURCE)}: {node.name}")  # type: ignore[attr-defined]
    return found


def measured() -> dict[str, int]:
    loaded = modules_of_fit()
    found = {
        "lines of model, data, train, run and cli": sum(lines(sources(SOURCE / room)) for room in READ_FIRST),
        "lines of all source without tests": lines(sources()),
        "lines of its tests": lines([*REPO.glob("tests/**/*.py"), *filter(is_test, SOURCE.rglob("*.py"))]),
        "lines of contrib without tests": lines(sources(CONTRIB)),
        "lines of contrib's tests": lines(path for path in CONTRIB.rglob("*.py") if is_test(path)),
        "kinds of what an extra adds": len(importlib.import_module(f"{SOURCE.name}.plugins").KINDS),
        "modules that `fit` of one step loads": len(loaded),
        "of them in the core": sum(".extras" not in name for name in loaded),
    }
    for name, files in walks().items():
        found |= {f"files of {name}": len(files), f"lines of {name}": lines(files)}
    found["file names in two rooms of the core"] = len(names_in_two_rooms())
    found["constructors with more than 20 parameters"] = len(long_constructors())
    scripts = list((REPO / "benchmarks").glob("*.py"))
    found |= {"scripts in benchmarks": len(scripts), "lines of benchmarks": lines(scripts)}
    return found


class Extra(NamedTuple):
    """A row of the table: what an extra brings, and what keeping it costs."""

    name: str
    folder: Path
    brings: str
    lines: int
    tests: int
    packages: str
    """Those of its optional group in pyproject.toml, if it has one."""


def extras() -> Iterator[Extra]:
    """The extras that are here and the folders of contrib, by name."""
    groups = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for start in (*sorted(EXTRAS.glob("*/__init__.py")), *sorted(CONTRIB.glob("*/__init__.py"))):
        files = sources(start.parent)
        text = "\n".join(path.read_text() for path in files)
        tests = [path for path in start.parent.rglob("*.py") if is_test(path)]
        needed = []
        for group, requirements in groups.items():
            packages = [re.split(r"[<>=\[;~! ]", requirement)[0] for requirement in requirements]
            imported = [package.replace("-skinny", "").replace("-", "_") for package in packages]
            if group != "dev" and any(re.search(rf"\b(import|from) {name}\b|\"{name}\"", text) for name in imported):
                needed.append(f"`{group}`: {', '.join(packages)}")
        brings = (ast.get_docstring(ast.parse(start.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        yield Extra(start.parent.name, start.parent, brings, lines(files), lines(tests), "; ".join(needed))


def table() -> str:
    rows = ["| extra | brings | lines | of tests | optional packages |", "|---|---|---|---|---|"]
    for extra in extras():
        link = f"[{extra.name}](../{extra.folder.relative_to(REPO).as_posix()})"
        brings = extra.brings.replace("|", "\\|")
        rows.append(f"| {link} | {brings} | {extra.lines:,} | {extra.tests:,} | {extra.packages} |")
    return "\n".join(rows)


def write() -> None:
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[-1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extras", action="store_true", help="print the table of the extras")
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.relative_to(REPO)}")
    given = parser.parse_args()
    if given.write:
        write()
    elif given.extras:
        print(table())
    else:
        print(f"{'':44} {'now':>8} {'limit':>8} {'goal':>8}")
        for name, value in measured().items():
            print(f"{name:44} {value:8,} {LIMITS[name].reached:8,} {LIMITS[name].goal:8,}")
        for found in (names_in_two_rooms(), long_constructors()):
            print(*found, sep="\n", end="\n" if found else "")


if __name__ == "__main__":
    main()

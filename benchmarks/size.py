"""How much there is to read and how dense it is: nodes of the syntax tree, modules, files, and what each extra adds.

    python benchmarks/size.py [--extras | --write | --worst N]

It prints what `LIMITS` names beside its limit and its goal; `make house` holds the limits. A node is a statement or an
expression of the syntax tree. Lines are not limited: a line can hold any number of nodes, so a limit on lines rewards
folding code together, and one on nodes rewards doing less. --worst prints the densest functions, --extras the table of
the extras, and --write puts that table into docs/your_project.md.
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
PROJECT = SOURCE / "project"
"""What `cait new` copies: no code of the package."""
TOUR, PAGE = REPO / "docs/tour.md", REPO / "docs/your_project.md"
GROUND = "the ground floor"
"""The files of the core that lie in no room."""
SHORT = 6
"""Lines of code; the density of a shorter function says little."""
VAGUE = {
    *("found", "place", "places", "held", "told", "given", "made", "said"),
    *("own", "kind", "part", "parts", "each", "of"),
}
"""Local names that say neither what a value is nor what it is for."""
MOST_PARAMETERS = 20
BEGIN, END = "<!-- extras, by benchmarks/size.py --write -->", "<!-- end -->"


class Limit(NamedTuple):
    """What the tree keeps to today, and what is wanted. A change may lower a limit; your own project may raise it."""

    reached: float
    goal: float


LIMITS = {
    "nodes of the core": Limit(41840, 27000),
    "nodes of src, the extras among them": Limit(82174, 60000),
    "nodes of contrib": Limit(21607, 18000),
    "nodes of the tests": Limit(89154, 85000),
    "nodes a line in cli": Limit(5.5, 5.0),
    "nodes a line in data": Limit(5.5, 5.0),
    "nodes a line in guards": Limit(5.5, 5.0),
    "nodes a line in model": Limit(6.0, 5.5),
    "nodes a line in run": Limit(5.5, 5.0),
    "nodes a line in train": Limit(5.5, 5.0),
    "nodes a line in the ground floor": Limit(5.5, 5.0),
    "nodes a line in the densest function of the core": Limit(10.5, 8.0),
    "names in the core that say nothing": Limit(5, 0),
    "kinds of what an extra adds": Limit(14, 12),
    "modules that `fit` of one step loads": Limit(93, 60),
    "of them in the core": Limit(53, 45),
    "files of a batch": Limit(9, 8),
    "nodes of a batch": Limit(8539, 7000),
    "files of a step": Limit(8, 8),
    "nodes of a step": Limit(6991, 5500),
    "files of a checkpoint and its resume": Limit(14, 13),
    "nodes of a checkpoint and its resume": Limit(11311, 9000),
    "file names in two rooms of the core": Limit(0, 0),
    "constructors with more than 20 parameters": Limit(0, 0),
    "scripts in benchmarks": Limit(14, 13),
    "nodes of benchmarks": Limit(16283, 15240),
}


class Function(NamedTuple):
    """A function and how dense it is."""

    density: float
    """Nodes a line of code."""
    lines: int
    name: str
    """As "src/cait/disk.py:12 read"."""


class Measured(NamedTuple):
    """What a file has to read."""

    nodes: int
    lines: int
    """Of code: no docstrings, comments and blank lines."""
    vague_names: int
    functions: list[Function]

    @property
    def density(self) -> float:
        return self.nodes / max(1, self.lines)


def measure(path: Path) -> Measured:
    text = path.read_text()
    tree = ast.parse(text)
    docstring_lines = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstring_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code_lines = set()
    for number, line in enumerate(text.splitlines(), 1):
        is_code = line.strip() and not line.strip().startswith("#")
        if is_code and number not in docstring_lines:
            code_lines.add(number)

    def code(root: ast.AST) -> list[ast.expr | ast.stmt]:
        nodes = [node for node in ast.walk(root) if isinstance(node, ast.expr | ast.stmt)]
        return [node for node in nodes if node.lineno not in docstring_lines]

    nodes = code(tree)
    vague_names = 0
    functions = []
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            vague_names += node.id in VAGUE
        if isinstance(node, ast.FunctionDef):
            vague_names += node.name.lstrip("_").startswith("of_")
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            lines = len(code_lines & set(span))
            name = f"{path.relative_to(REPO)}:{node.lineno} {node.name}"
            functions.append(Function(len(code(node)) / max(1, lines), lines, name))
    return Measured(len(nodes), len(code_lines), vague_names, functions)


def together(paths: Iterable[Path]) -> Measured:
    """Several files as one."""
    files = [measure(path) for path in paths]
    functions = [function for file in files for function in file.functions]
    return Measured(
        sum(file.nodes for file in files),
        sum(file.lines for file in files),
        sum(file.vague_names for file in files),
        functions,
    )


def is_test(path: Path) -> bool:
    return path.parent.name == "tests"


def sources(folder: Path | None = None) -> list[Path]:
    """The Python files in a folder of the source, all of it if none is named, without tests."""
    return [path for path in sorted((folder or SOURCE).rglob("*.py")) if not is_test(path)]


def core_sources() -> list[Path]:
    """Those of the core."""
    others = {EXTRAS, PROJECT}
    return [path for path in sources() if others.isdisjoint(path.parents)]


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
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True
        )
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
    core = [path for path in core_sources() if path.name != "__init__.py"]
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


def rooms() -> dict[str, list[Path]]:
    """The files of the core by room."""
    files: dict[str, list[Path]] = {}
    for path in core_sources():
        parts = path.relative_to(SOURCE).parts
        room = parts[0] if len(parts) > 1 else GROUND
        files.setdefault(room, []).append(path)
    return files


def densest(core: Measured) -> list[Function]:
    """The functions that are not short, the densest first."""
    functions = [function for function in core.functions if function.lines >= SHORT]
    return sorted(functions, reverse=True)


def measured() -> dict[str, float]:
    files_by_room = rooms()
    core = together(path for files in files_by_room.values() for path in files)
    tests = {
        *REPO.glob("tests/**/*.py"),
        *filter(is_test, SOURCE.rglob("*.py")),
        *filter(is_test, CONTRIB.rglob("*.py")),
    }
    numbers: dict[str, float] = {
        "nodes of the core": core.nodes,
        "nodes of src, the extras among them": together(sources()).nodes,
        "nodes of contrib": together(sources(CONTRIB)).nodes,
        "nodes of the tests": together(tests).nodes,
    }
    for room, files in sorted(files_by_room.items()):
        numbers[f"nodes a line in {room}"] = round(together(files).density, 2)
    numbers["nodes a line in the densest function of the core"] = round(densest(core)[0].density, 2)
    numbers["names in the core that say nothing"] = core.vague_names
    loaded = modules_of_fit()
    numbers["kinds of what an extra adds"] = len(
        importlib.import_module(f"{SOURCE.name}.plugins").KINDS
    )
    numbers["modules that `fit` of one step loads"] = len(loaded)
    numbers["of them in the core"] = sum(".extras" not in name for name in loaded)
    for name, files in walks().items():
        numbers[f"files of {name}"] = len(files)
        numbers[f"nodes of {name}"] = together(files).nodes
    numbers["file names in two rooms of the core"] = len(names_in_two_rooms())
    numbers["constructors with more than 20 parameters"] = len(long_constructors())
    scripts = list((REPO / "benchmarks").glob("*.py"))
    numbers["scripts in benchmarks"] = len(scripts)
    numbers["nodes of benchmarks"] = together(scripts).nodes
    return numbers


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
    groups = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for start in (*sorted(EXTRAS.glob("*/__init__.py")), *sorted(CONTRIB.glob("*/__init__.py"))):
        files = sources(start.parent)
        text = "\n".join(path.read_text() for path in files)
        tests = [path for path in start.parent.rglob("*.py") if is_test(path)]
        needed = []
        for group, requirements in groups.items():
            packages = [re.split(r"[<>=\[;~! ]", requirement)[0] for requirement in requirements]
            imported = [package.replace("-skinny", "").replace("-", "_") for package in packages]
            if group != "dev" and any(
                re.search(rf"\b(import|from) {name}\b|\"{name}\"", text) for name in imported
            ):
                needed.append(f"`{group}`: {', '.join(packages)}")
        brings = (
            (ast.get_docstring(ast.parse(start.read_text())) or "")
            .split("\n\n")[0]
            .replace("\n", " ")
        )
        yield Extra(
            start.parent.name, start.parent, brings, lines(files), lines(tests), "; ".join(needed)
        )


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
    parser.add_argument(
        "--write", action="store_true", help=f"put it into {PAGE.relative_to(REPO)}"
    )
    parser.add_argument(
        "--worst", type=int, metavar="N", help="print the N densest functions of the core"
    )
    options = parser.parse_args()
    if options.write:
        write()
    elif options.extras:
        print(table())
    elif options.worst:
        core = together(path for files in rooms().values() for path in files)
        for function in densest(core)[: options.worst]:
            print(
                f"{function.density:5.1f} nodes a line, {function.lines:3} lines  {function.name}"
            )
    else:
        print(f"{'':50} {'now':>8} {'limit':>8} {'goal':>8}")
        for name, value in measured().items():
            print(f"{name:50} {value:8,} {LIMITS[name].reached:8,} {LIMITS[name].goal:8,}")
        for found in (names_in_two_rooms(), long_constructors()):
            print(*found, sep="\n", end="\n" if found else "")


if __name__ == "__main__":
    main()

"""Imports run one way, from the command line down to the model, and the light parts stay light."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from harness import REPO, python

# From the top; a module may import from its own room and from those below it.
ROOMS = ["extras", "cli", "guards", "run", "train", "data", "model"]
GROUND = "below"
"""What lies in no room: every room may import it."""
SOURCE = REPO / "src" / "cait"
FILES = [path for path in SOURCE.rglob("*.py") if "tests" not in path.relative_to(SOURCE).parts]
CONTRIB = [path for path in (REPO / "contrib").rglob("*.py") if path.parent.name != "tests"]
"""Parts for few; they may be removed."""


def room(name: str) -> str:
    """The room of a module, by its import path or by its path below the source."""
    first = name.split(".")[1] if name.startswith("cait.") else name
    return first if first in ROOMS else GROUND


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cait":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("cait.")}
    return found


def test_imports_point_down() -> None:
    order, seen = {name: level for level, name in enumerate([*ROOMS, GROUND])}, 0
    for path in FILES:
        # the doors of the package
        if path.parent == SOURCE and path.name in (
            "__init__.py",
            "__main__.py",
        ):
            continue
        here = room(path.relative_to(SOURCE).parts[0])
        for name in imports(path):
            seen += 1
            assert order[room(name)] >= order[here], f"{path} imports {name}, which is above it"
            assert not (path.name == "module.py" and room(name) == "data"), (
                f"{path} imports the data"
            )
            assert not (here == "data" and room(name) == "model"), f"{path} imports the model"
    assert seen > 100


def test_contrib_imports_the_package_and_never_the_other_way() -> None:
    """Nor one of its folders another; the files beside the folders are for all of them."""
    for path in FILES:
        assert not re.search(
            r"\bcontrib\.\w|\bimport contrib\b|from contrib\b", path.read_text()
        ), path
    shared = {path.stem for path in (REPO / "contrib").glob("*.py")}
    for path in CONTRIB:
        others = {*re.findall(r"contrib\.(\w+)", path.read_text())} - {path.parent.name, *shared}
        assert not others, f"{path} needs {others}"


def test_the_model_needs_torch_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('lightning', 'torchmetrics', 'torchvision', 'jsonargparse', 'timm', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import cait, torch\n"
        "cait.create_model('xxs24', 32, depth=1, embed_dim=32, num_heads=2)(torch.zeros(1, 3, 32, 32))\n"
        "print(sum(p.numel() for p in cait.create_model('xxs24').parameters()))"
    )
    done = python(code)
    assert done.stdout.strip() == "11956264", done.stderr


@pytest.mark.slow
def test_the_light_verbs_do_not_wait_for_lightning(digits_root: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None\n"
        "from cait.cli import main\n"
        "sys.modules['torch'] = None\n"
        "for words in ('--version', 'runs', 'paper'):\n"
        "    main(words.split())\n"
        "del sys.modules['torch']\n"
        f"for words in ('zoo', '--help', 'resume --help', 'eval -h', 'check {digits_root}'):\n"
        "    main(words.split())"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("cait 0.", "there are no runs"):
        assert words in done.stdout
    for words in ("usage: cait VERB", "usage: cait resume", "usage: cait eval", "xxs24", "1,437"):
        assert words in done.stdout


def test_only_the_model_reads_the_fields_of_a_network() -> None:
    """Any network takes CaiT's place, and most have no `config`."""
    reading = re.compile(r"(?:model|network|net|teacher|student)\.config\b")
    outside = [path for path in FILES if path.parent.name != "model"]
    assert len(outside) > 40
    found = [
        f"{path}:{line}"
        for path in outside
        for line in path.read_text().splitlines()
        if reading.search(line)
    ]
    assert [line for line in found if "cait.model.config" not in line] == []


ELSEWHERE = {
    "guards/configurations.py": "the reader of YAML",
    "signature.py": "a text that this account has signed",
    "ckpt.py": "torch's reader, after `open_file`",
    "model/weights.py": "torch's and safetensors' readers, after `open_file`",
    "extras/page.py": "the page's template",
    "extras/new/verb.py": "the metadata and the project of this package",
    "extras/recipe/figures.py": "what the kernel says",
    "contrib/demo/web_runtime.py": "a package that npm has fetched",
    "contrib/serve/server.py": "the page",
    "contrib/runner.py": "what the run's process prints, appended",
    "contrib/monitor/callback.py": "rows, appended to a run that is locked",
    "data/reading.py": "images",
    "extras/channels/planes.py": "images",
    "contrib/shards/bucket.py": "shards of a data set",
    "contrib/shards/source.py": "shards of a data set",
    "contrib/shards/writer.py": "shards of a data set",
}
"""Files that open others themselves, and what these are: none is a run's file that is read."""
OPENS = {"open", "read_text", "read_bytes", "safe_load", "safe_load_all", "full_load", "read_csv"}
READERS = {"yaml", "json", "pickle", "np", "torch"}


def opened(path: Path) -> list[str]:
    """The calls in a file that open or parse another, without those through `cait.disk`."""
    found, root = [], SOURCE if path in FILES else REPO
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        holder, _, name = ast.unparse(node.func).rpartition(".")
        reads = (
            name in OPENS
            and holder not in ("disk", "configurations", "beside", "tarfile")
            and bool(holder or name == "open")
        )
        reads |= (name in ("load", "compose") and holder in READERS) or name == "load_file"
        call = ast.unparse(node)
        if reads and not any(word in call for word in ("O_WRONLY", "os.devnull", "'wb'")):
            found.append(f"{path.relative_to(root)}:{node.lineno}: {call}")
    return found


def test_one_opener_reads_all_files_of_runs() -> None:
    """`cait.disk.open_file`: a regular file of a bounded size. Take it, or give a reason in `ELSEWHERE`."""
    found = {
        str(path.relative_to(SOURCE)): opened(path) for path in FILES if path.name != "disk.py"
    }
    found |= {str(path.relative_to(REPO)): opened(path) for path in CONTRIB}
    assert [
        line for name, lines in found.items() if name not in ELSEWHERE for line in lines if lines
    ] == []
    assert [name for name in ELSEWHERE if name in found and not found[name]] == []


def test_one_console_shows_all_names() -> None:
    """`cait.errors.console` obeys no name; rich's own takes brackets for markup."""
    plain = re.compile(r"\bConsole\(|\brich\.print\(|csv\.writer\(")
    allowed = {"errors.py", "disk.py", "predict.py", "reading.py", "callback.py"}
    assert [
        path
        for path in FILES + CONTRIB
        if path.name not in allowed and plain.search(path.read_text())
    ] == []


def test_no_two_files_import_each_other() -> None:
    """Not even within functions, nor by way of others."""
    graph = {}
    for path in FILES + CONTRIB:
        root = SOURCE.parent if path in FILES else REPO
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith(("cait", "contrib"))
            ):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = found - {"cait"}
    assert "cait.model.residual" in graph["cait.model.cait"]
    order = list(
        TopologicalSorter(
            {name: found & graph.keys() for name, found in graph.items()}
        ).static_order()
    )
    assert order.index("cait.errors") < order.index("cait.cli.command")

"""Imports run one way, from the command line down to the model, and the light parts stay light."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from harness import REPO, parsed, python, works
from source_files import CONTRIB, FILES, SOURCE, imports, nodes

# From the top; a module may import from its own room and from those below it.
ROOMS = ["extras", "cli", "guards", "run", "train", "data", "model"]
DOORS = [SOURCE / "__init__.py", SOURCE / "__main__.py"]


def level(module):
    """The number of a module's room; what lies in no room is below them all."""
    room = module.split(".")[1]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def module_of(path):
    root = REPO / "src" if path in FILES else REPO
    return ".".join(path.relative_to(root).with_suffix("").parts)


def test_imports_point_down():
    for path in FILES:
        if path in DOORS:
            continue
        here = level(module_of(path))
        for name in imports(path):
            assert level(name) >= here, f"{path} imports {name}, which is above it"
            assert path.name != "module.py" or level(name) != ROOMS.index("data"), path
            assert here != ROOMS.index("data") or level(name) != ROOMS.index("model"), path
    assert sum(len(imports(path)) for path in FILES) > 100


def test_no_two_files_import_each_other():
    """Not even within functions, nor by way of others."""
    graph = {module_of(path): imports(path) for path in FILES + CONTRIB}
    assert "cait.model.residual" in graph["cait.model.cait"]
    order = [
        *TopologicalSorter({name: graph[name] & graph.keys() for name in graph}).static_order()
    ]
    assert order.index("cait.errors") < order.index("cait.cli.command")


def test_contrib_imports_the_package_and_never_the_other_way():
    """Nor one of its folders another; the files beside the folders are for all of them."""
    for path in FILES:
        assert not re.search(r"\bcontrib\.\w|import contrib\b|from contrib\b", path.read_text()), (
            path
        )
    shared = {path.stem for path in (REPO / "contrib").glob("*.py")}
    for path in CONTRIB:
        folders = {*re.findall(r"contrib\.(\w+)", path.read_text())}
        assert folders <= {path.parent.name, *shared}, path


NETWORK_ALONE = """
import sys
for name in ("lightning", "torchmetrics", "torchvision", "jsonargparse", "timm", "triton"):
    sys.modules[name] = None
import cait, torch
cait.create_model("xxs24", 32, depth=1, embed_dim=32, num_heads=2)(torch.zeros(1, 3, 32, 32))
print(sum(p.numel() for p in cait.create_model("xxs24").parameters()))
"""
LIGHT_VERBS = """
import sys
sys.modules["lightning"] = None
from cait.cli import main
sys.modules["torch"] = None
for words in ("--version", "runs", "paper"):
    main(words.split())
del sys.modules["torch"]
for words in ("zoo", "--help", "resume --help", "eval -h"):
    main(words.split())
main(["check", {root!r}])
"""


def test_the_model_needs_torch_alone():
    done = python(NETWORK_ALONE)
    assert done.stdout.strip() == "11956264", done.stderr


@pytest.mark.slow
def test_the_light_verbs_do_not_wait_for_lightning(digits_root, tmp_path):
    done = works(python(LIGHT_VERBS.format(root=str(digits_root)), tmp_path))
    usage = ("usage: cait VERB", "usage: cait resume", "usage: cait eval")
    for words in ("cait 0.", "there are no runs", *usage, "xxs24", "1,437"):
        assert words in done.stdout


PATTERNS = {
    # any network takes CaiT's place, and most have no `config`
    r"(?:model|network|net|teacher|student)\.config\b(?<!cait\.model\.config)": "model",
    # `cait.errors.console` obeys no name; rich's own takes brackets for markup
    r"\bConsole\(|\brich\.print\(|csv\.writer\(": "errors disk predict reading callback",
}
"""Code, and the rooms and files that alone may have it."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_these_files_have_it(pattern):
    allowed = PATTERNS[pattern].split()
    having = [path for path in FILES + CONTRIB if re.search(pattern, path.read_text())]
    assert [path for path in having if {path.stem, path.parent.name}.isdisjoint(allowed)] == []


OPENERS = parsed(Path(__file__).with_name("openers.yaml"))
OPENS = {"open", "read_text", "read_bytes", "safe_load", "safe_load_all", "full_load", "read_csv"}
READERS = {"yaml", "json", "pickle", "np", "torch"}
OTHERS = {"disk", "configurations", "beside", "tarfile"}
"""What a file is opened through: `cait.disk`, or no file of a run."""


def opens(node):
    """Whether this is a call that opens or parses a file, without those through `cait.disk`."""
    if not isinstance(node, ast.Call):
        return False
    holder, _, name = ast.unparse(node.func).rpartition(".")
    if name in ("load", "compose"):
        return holder in READERS
    is_method = name in OPENS and holder not in OTHERS and bool(holder or name == "open")
    writes = re.search("O_WRONLY|os.devnull|'wb'", ast.unparse(node))
    return (is_method or name == "load_file") and not writes


def test_one_opener_reads_all_files_of_runs():
    """`cait.disk.open_file`: a regular file of a bounded size. Take it, or give a reason in openers.yaml."""
    opening = set()
    for path in FILES + CONTRIB:
        if path.name != "disk.py" and any(map(opens, nodes(path))):
            root = SOURCE if path in FILES else REPO
            opening.add(str(path.relative_to(root)))
    there = {name for name in OPENERS if (SOURCE / name).exists() or (REPO / name).exists()}
    assert opening == there

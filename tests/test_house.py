"""Imports run one way, from the command line down to the model, and the light parts stay light."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from harness import REPO, python

# From the top; a module may import from its own room and from those below it.
FLOORS = [
    ["__main__"],
    ["extras"],
    ["cli"],
    ["guards"],
    ["run"],
    ["train"],
    ["data"],
    ["model"],
    ["ckpt", "disk", "errors", "file_lock", "plots", "references", "seeds", "settings", "signature"],
]
# Neighbours that must not know each other.
APART = [("module", "datamodule"), ("datamodule", "module"), ("data", "optim"), ("optim", "data")]
SOURCE = REPO / "src" / "cait"


def room(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cait":
            found |= {room(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {room(alias.name) for alias in node.names if alias.name.startswith("cait.")}
    return found


def test_imports_point_down() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    seen = 0
    for path in SOURCE.rglob("*.py"):
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for there in imports(path):
            seen += 1
            assert floor[there] >= floor[here], f"{path} imports {there}, which is above it"
            assert (here, there) not in APART, f"{path} imports its neighbour {there}"
            # The data sets know nothing of the network.
            assert not (here in ("data", "datamodule", "losses", "optim") and there == "model"), (
                f"{path} imports the model"
            )
    assert seen > 20


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


def test_the_light_verbs_do_not_wait_for_lightning(digits_root: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None\n"
        "from cait.cli import main\n"
        "sys.modules['torch'] = None\n"
        "for words in ('--version', 'fit --help', 'fit --help=model', 'runs'):\n"
        "    main(words.split())\n"
        "del sys.modules['torch']\n"
        f"for words in ('--help', 'resume --help', 'eval -h', 'zoo', 'imagenet-check {digits_root}'):\n"
        "    main(words.split())"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("cait 0.", "usage: cait fit", "  embed_dim: int", "there are no runs"):
        assert words in done.stdout
    for words in ("usage: cait VERB", "usage: cait resume", "usage: cait eval", "xxs24", "1,437"):
        assert words in done.stdout


def test_only_the_model_reads_the_fields_of_a_network() -> None:
    """Any network takes CaiT's place, and most have no `config`."""
    reading = re.compile(r"(?:model|network|net|teacher|student)\.config\b")
    outside = [path for path in SOURCE.rglob("*.py") if path.parent.name != "model"]
    assert len(outside) > 40
    found = [f"{path}:{line}" for path in outside for line in path.read_text().splitlines() if reading.search(line)]
    assert [line for line in found if "cait.model.config" not in line] == []


def test_no_two_files_import_each_other() -> None:
    """Not even within functions, nor by way of others."""
    graph = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("cait", *path.relative_to(SOURCE).with_suffix("").parts))
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cait"):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = found - {"cait"}
    assert "cait.model.cait" in graph["cait.model.network"]
    order = list(TopologicalSorter({name: found & graph.keys() for name, found in graph.items()}).static_order())
    assert order.index("cait.errors") < order.index("cait.cli")

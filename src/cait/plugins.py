"""The door for extras: what folders of cait/extras and contrib and installed packages add, asked for by kind.

An extra is a package. Its `__init__.py` holds any of the names of `KINDS` and imports nothing heavy: code that needs
torch or Lightning is named by path, or imported inside a function. The core never names an extra, so a folder that
is removed takes its verbs, settings and callbacks with it. The folders of `contrib/` are extras of a clone; elsewhere
`cait-lightning-contrib` installs them in its package `cait_contrib`. Other packages come in by the entry-point group
`cait.extras`, each entry the import path of such a package. docs/extending.md shows one.
"""

import functools
import importlib
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from cait import IS_INSTALLED, references
from cait.errors import error_line, tell_once
from cait.settings import Rule, Settings, names_in

GROUP = "cait.extras"
FOLDER = Path(__file__).parent / "extras"

KINDS = {
    "VERBS": "dict[str, Verb]: verbs of `cait` by name",
    "SETTINGS": "list[Setting]: settings of `cait fit` and `cait eval`",
    "GROUPS": 'dict[str, str]: {"data": "module:Name"}: a `cait.settings.Group` of settings of "data" or "model"; '
    "one of the data may have `train_order(data)`, which gives a `cait.data.loader.Order` or None, "
    "and one that is derived from a group of the core takes its place; or "
    '{"fields": ...}: fields of CaiT, see `cait.model.config.config_class`; or {"network": ...}: a base of '
    "`cait.model.cait.CaiT`, for more methods",
    "TIMM_FIELDS": 'dict[str, str]: {"name": "module:function"}: fields of timm networks; the function is called with '
    "the network, the value and the shape of an image, and returns a network",
    "add_settings": "(line, program): adds settings to a command line before it is parsed; see cait.cli.options.Line",
    "callbacks": "(run) -> list[Callback]: callbacks of a run that is about to train",
    "step_callbacks": "(module, data) -> list[Callback]: what decides how steps are computed, also when repeated",
    "open_source": "(root, settings) -> DataSource or None: the data set that `root` names, if it is of this kind",
    "leave_out": "(source, images) -> Images: what else does not train of images that are divided; see cait.data.table",
    "TRAIN_PIPELINE": '"module:Class": reads training images in place of timm, see ImageNetDataModule.pipeline',
    "ATTENTION_BACKENDS": 'dict[str, str]: {"name": "module:function"}; "default" is what a network takes that names '
    "none, see `cait.model.attention.backend_named`",
    "TASKS": 'dict[str, str]: {"name": "module:Task"}: what the labels of an image are; see cait.train.metrics',
    "results": "(folder) -> Results or None: what a run is compared with, for its summary, its card and its page",
    "scorers": "(scoring) -> Callback: what `cait eval` has beyond loss and accuracy; see cait.cli.evaluate.Scoring",
}


@dataclass(frozen=True)
class Verb:
    """A verb of the command line."""

    function: str
    """As "module:name"; called with the words after the verb, and a `cait.run.program.Program`."""
    help: str
    """What `cait --help` says of it, at most 80 letters a line."""
    quick: bool = False
    """Whether it needs no PyTorch; before any other verb a line says that PyTorch is imported, which takes seconds."""

    def load(self) -> Any:
        return references.locate(self.function)


@dataclass(frozen=True)
class Setting:
    """A setting of the verbs that train or score."""

    name: str
    """Without the dashes, as "logger_args"."""
    type: Any
    """As a function's annotation."""
    default: Any
    help: str
    verbs: Sequence[str] = ()
    """Those that take it, "fit" or "eval"; none named means both."""
    rules: Sequence[Rule] = ()
    """As `cait.settings.In("[1, inf)")`."""


@dataclass(frozen=True)
class Results:
    """A table beside a run's own scores; the last cell of a row is the figure."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Run:
    """A run that is about to train, as its extras see it."""

    config: Any
    """The settings of `cait fit`, as the command line has them."""
    trainer: Any
    """The Trainer's among them."""
    folder: Path
    """Nothing may be written there if `trainer.fast_dev_run`."""
    data: Any
    module: Any
    first_step: int
    """Optimizer steps that the run has done; 0 in a new run."""
    program: Any
    """What `cait` was started with, a `cait.run.program.Program`."""
    typed: set[str]
    """The names of the settings that the command line itself gives, as "model.lr"."""
    start: str = ""
    """The checkpoint that it begins from, and its step, as "last.ckpt at step 40"; empty without one."""

    @property
    def keeps(self) -> bool:
        """Whether it leaves anything in its folder: figures or checkpoints."""
        trainer = self.trainer
        return not trainer.fast_dev_run and (
            trainer.logger is not False or trainer.enable_checkpointing is not False
        )


@functools.cache
def extras() -> dict[str, ModuleType]:
    """The extras by name: the folders of cait/extras and contrib, then installed packages that can be imported."""
    paths = sorted(_packages(FOLDER, GROUP) + _contributed())
    modules = {name: importlib.import_module(path) for name, path in paths}
    for point in entry_points(group=GROUP):
        try:
            modules[point.name] = importlib.import_module(point.value)
        except Exception as error:  # it may raise anything
            tell_once(f"left out the extra {point.name}: {error_line(error)}")
    return modules


def _contributed() -> list[tuple[str, str]]:
    """Name and import path of each folder of `contrib/`, which lies beside `src` in a clone, else in `cait_contrib`.

    No folder counts if Python finds a package `contrib` of the user's own.
    """
    clone = FOLDER.parents[2]
    is_clone = not IS_INSTALLED and (clone / "contrib").is_dir()
    root = clone if is_clone else _folder_of("cait_contrib")
    if root is None:
        return []
    sys.path.append(str(root))  # processes that this one starts get it too
    folder = root / "contrib"
    if _folder_of("contrib") != folder.resolve():
        tell_once(
            f"left out {folder}: Python finds another contrib first; rename that to have these verbs"
        )
        return []
    return _packages(folder, "contrib")


def _folder_of(package: str) -> Path | None:
    """The folder of a package, which is not imported; None if there is none."""
    spec = find_spec(package)
    folders = spec and spec.submodule_search_locations
    return Path(folders[0]).resolve() if folders else None


def _packages(folder: Path, prefix: str) -> list[tuple[str, str]]:
    return [
        (path.parent.name, f"{prefix}.{path.parent.name}") for path in folder.glob("*/__init__.py")
    ]


def of_kind(kind: str) -> list[Any]:
    """What the extras have under this name of `KINDS`, in the order of their names."""
    assert kind in KINDS, kind
    values = [getattr(extra, kind, extra) for extra in extras().values()]
    # a file of this name is no kind
    return [value for value in values if not isinstance(value, ModuleType)]


def by_name(kind: str) -> dict[str, Any]:
    """The dictionaries that the extras have under this name, in one."""
    return functools.reduce(operator.or_, of_kind(kind), {})


def step_callbacks(module: Any, data: Any) -> list[Any]:
    """The callbacks of extras that decide how steps are computed."""
    return [callback for make in of_kind("step_callbacks") for callback in make(module, data)]


def settings() -> list[Setting]:
    """The settings that extras add to verbs."""
    return [setting for added in of_kind("SETTINGS") for setting in added]


def groups(part: str) -> list[type]:
    """The dataclasses whose fields extras add to the settings of "data" or "model", or to CaiT's "fields"."""
    return [references.locate(added[part]) for added in of_kind("GROUPS") if part in added]


def without_use(root: str, settings: Settings) -> list[str]:
    """The settings of the data that extras add, and that no extra has which opens `root`."""
    used: set[str] = set()
    others: set[str] = set()
    for extra in extras().values():
        if "data" in getattr(extra, "GROUPS", {}) and hasattr(extra, "open_source"):
            names = names_in(references.locate(extra.GROUPS["data"]))
            if extra.open_source(root, settings) is None:
                others.update(names)
            else:
                used.update(names)
    return sorted(others - used)


def results(folder: Path) -> list[Results]:
    """The tables that extras have about a run."""
    return [table for read in of_kind("results") if (table := read(folder))]

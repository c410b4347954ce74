"""What a run may say. The folder may be a stranger's: it says what was learnt, and names neither code nor a place."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from cait import disk, plugins, references, signature
from cait.errors import UserError
from cait.guards.configurations import SavedConfig, config_files, read
from cait.run import rundir
from cait.train.ema import EMA

BUILT = ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")
"""Settings of the Trainer that may name a class."""
PLACES = ("run_name", "ckpt_path", "trainer.default_root_dir")
"""Settings that no verb takes from a run: it is where it lies, and a verb knows its checkpoint."""
PERSONAL = ("output", "weights_only", "trainer.logger")
"""Neither these, and a line says so: they write elsewhere, unpickle, or send what the user may send."""
WORDS = {
    *("best_metric", "best_mode", "trainer.precision", "trainer.gradient_clip_algorithm", "trainer.deterministic"),
    *("trainer.max_time", *(f"trainer.{name}" for name in BUILT if name != "logger")),
    *("model.name", "model.task", "model.fields", "model.channels_last", "model.loss", "model.class_weights"),
    *("model.optimizer", "model.optimizer_args", "model.schedule", "model.metrics", "model.distillation"),
    *("model.teacher", "model.teacher_fields", "data.root", "data.train_split", "data.val_split", "data.val_list"),
    *("data.interpolation", "data.fit", "data.background", "data.backend", "data.worker_start", "data.train_crop"),
    *("data.auto_augment", "data.augment_ops", "data.mix_mode", "data.class_names", "data.balance"),
}
"""Settings in which a stranger's run may use words; any other holds only numbers, true, false and null. Extras
add some, `LEARNT` in `cait.plugins`. None of them writes or sends anywhere, nor starts anything."""
STARTED = ("trainer.devices", "trainer.num_nodes", "data.num_workers")
"""Processes that a verb starts: a stranger's run may ask for one."""
NAME = re.compile(r"[\w.+-]*|timm/[\w.+-]+")
"""A word in the settings of the model: of a network, an optimizer or a loss, and no path."""
PUBLIC = ("torch.nn", "torch.optim", "torchmetrics.classification")
"""A run may name the public classes of these as `package.module:name`; no function is among them."""
PLAIN_CLASSES = (f"{EMA.__module__}.{EMA.__qualname__}",)
"""Classes among the Trainer's callbacks that any run may name: they only take numbers."""
CLASS_PATH = re.compile(r"\b[^\W\d]\w*(?:\.[^\W\d]\w*)+")
SETTING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")
REMEDY = "this account did not start the run, or config.yaml has changed since; if you trust it add --trust-config"
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)
"""Whether --trust-config is given, while a checkpoint is loaded."""


@contextlib.contextmanager
def only_known(
    settings: Sequence[str],
    given: Sequence[str],
    trusted: bool,
    builds: bool,
    of_first: Callable[[Callable[[], str]], str] = lambda read: read(),
) -> Iterator[Mapping[Path, SavedConfig]]:
    """The configurations of a command line, each read once, and limited to what it may say.

    Args:
        settings: the whole command line; its first configuration is the run's.
        given: the options that the user typed of it, without the run's name, which may be a stranger's too.
        trusted: whether --trust-config is given.
        builds: whether the verb builds the Trainer's classes. Then other configurations are the user's own.
        of_first: gives every process what this function returns in the first, which alone needs the key then.
    """
    files = config_files(settings)
    found = json.loads(of_first(lambda: json.dumps([read(path) for path in files])))
    configs = {path: SavedConfig(text, own or trusted) for path, (text, own, _) in zip(files, found, strict=True)}
    for path in files:
        if path.name == rundir.CONFIG:
            disk.check_inside(path.parent)
        if not builds or (path == files[0] and not configs[path].own):
            limit = partial(as_data, path=path, given=given, own=configs[path].own, builds=builds)
            configs[path] = configs[path]._replace(limit=limit)
    yield configs


@contextlib.contextmanager
def only_own(trusted: bool) -> Iterator[None]:
    """Let a checkpoint that is loaded in the body name code, and its run's settings more than `WORDS`, if `trusted`."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def check_code(path: Path, content: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse a run's settings or hyper-parameters that name code which its config.yaml, if signed, does not name.

    Raises:
        UserError: they name some, and --trust-config is not given.
    """
    if "_class_path" in content:  # Lightning would build it
        raise UserError(f"{path} cannot be loaded: The class {content['_class_path']} is not the run's")
    allowed = _public() + references.paths_in(signature.own_text(folder / rundir.CONFIG) if folder else "")
    code = [part for part in _parts(content) if isinstance(part, str) and references.is_path(part)]
    if not _trusted.get() and (code := [part for part in code if part not in allowed]):
        raise UserError(f"{path} names {code[0]}, code that may do anything: {REMEDY}")


def as_data(
    config: Mapping[str, Any], known: Collection[str], path: Path, given: Sequence[str], own: bool, builds: bool
) -> dict[str, Any]:
    """The settings of a run that a verb may use; a line says which are left out.

    Left out are those of `PLACES`, those that the user gives in their place, the Trainer's classes if the verb builds
    none, and of a run that is not the account's own all that `WORDS` does not list.

    Args:
        config: as the file `path` holds it.
        known: every setting and group of settings, as "model" and "model.lr"; none means any.
        given: what the user typed; what it names may be named by the run too.
        own: whether this account has signed the configuration, or the user trusts it: then it may name code.
        builds: whether the verb builds the Trainer's classes.

    Raises:
        UserError: a setting of a stranger's run names code, or a place where the verb cannot do without.
    """
    words = " ".join(given)
    allowed = {*PLAIN_CLASSES, *CLASS_PATH.findall(words), *references.paths_in(words), *_public()}
    replaced = {*PLACES, *(word.split("=")[0].removeprefix("--") for word in given if word.startswith("--"))}
    left_out: list[str] = []

    def takes(name: str, value: Any) -> bool:
        if name in PERSONAL or (not builds and _builds(name, value)):
            return False
        if not own and (code := [found for found in _code(name, value, known) if found not in allowed]):
            raise UserError(f"{path} names {code[0]}, code that may do anything: {REMEDY}")
        if not own and builds and (places := _places(name, value, allowed)):
            raise UserError(f"{path} names {places[0]}, a place of its own: {REMEDY}")
        return own or may_say(name, value, allowed)

    def kept(values: Mapping[Any, Any], group: str = "") -> dict[Any, Any]:
        settings = {}
        for key, value in values.items():
            name = f"{group}{key}"
            if name in replaced:
                continue
            if not group and isinstance(value, dict) and (not known or _is_group(name, known)):
                settings[key] = kept(value, f"{name}.")
            elif takes(name, value):
                settings[key] = value
            elif value:
                left_out.append(name)
        return settings

    settings = kept(config)
    if left_out:
        rank_zero_info(f"{path}: left out {', '.join(left_out)}; on the command line they count")
    return settings


def may_say(name: str, value: Any, allowed: Collection[str] = ()) -> bool:
    """Whether a stranger's run may have this value in a setting; `allowed` are parts that may be named."""
    if _trusted.get():
        return True
    if name in STARTED:
        return value in (None, "auto", "1", 0, 1)
    if not any(isinstance(part, str) and part not in allowed for part in _parts(value)):
        return True
    return name in WORDS | plugins.learnt() and not _places(name, value, allowed)


def _places(name: str, value: Any, allowed: Collection[str]) -> list[str]:
    """The words in a setting of the model that may be paths: of a file of weights, as a teacher's."""
    words = [part for part in _parts(value) if isinstance(part, str) and part not in allowed]
    of_model = name in WORDS and name.startswith("model.")
    return [word for word in words if of_model and not (NAME.fullmatch(word) or references.is_path(word))]


def _is_group(name: str, known: Collection[str]) -> bool:
    return any(setting.startswith(f"{name}.") for setting in known)


def _builds(name: str, value: Any) -> bool:
    """Whether a setting makes the Trainer build a class: not if it is one of Lightning's words, such as "ddp"."""
    group, _, setting = name.partition(".")
    is_word = setting in ("accelerator", "strategy") and isinstance(value, str) and re.fullmatch(r"[\w-]+", value)
    return group == "trainer" and setting in BUILT and not is_word


def _code(name: str, value: Any, known: Collection[str]) -> Iterator[str]:
    """What would be imported, built or read as further settings for a setting, at any depth."""
    if name == "config" or not SETTING.fullmatch(name) or (value and _is_group(name, known)):
        yield f"{name}: {value}"
    if value and _builds(name, value):
        yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))
        yield from CLASS_PATH.findall(str(value))
    for part in _parts({name.rpartition(".")[2]: value}):
        if isinstance(part, dict) and "class_path" in part:
            yield str(part["class_path"])
        elif isinstance(part, str) and references.is_path(part):
            yield part


def _parts(value: Any) -> Iterator[Any]:
    """A value and all that it contains."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(part)


def _public() -> list[str]:
    modules = {path: importlib.import_module(path) for path in PUBLIC}
    return [
        f"{path}:{name}"
        for path, module in modules.items()
        for name in getattr(module, "__all__", ())
        if isinstance(getattr(module, name, None), type)
    ]

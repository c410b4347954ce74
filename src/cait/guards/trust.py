"""What a run may say. The folder may be a stranger's: it says what was learnt, and names neither code nor a place.

A run whose config.yaml this account has not signed may set

- numbers, true, false and null, wherever they stand;
- words in the settings of `WORDS`; in those of the model they are names, and no paths.

What names code ends the command, unless it is of `PUBLIC`. Anything else is left out, and a line says so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from cait import disk, plugins, references, signature
from cait.errors import UserError, printable
from cait.guards.configurations import SavedConfig, config_files, read
from cait.run import rundir

BUILT = ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")
"""Settings of the Trainer that may name a class."""
PLACES = ("run_name", "ckpt_path", "trainer.default_root_dir")
"""Settings that no verb takes from a run: it is where it lies, and a verb knows its checkpoint."""
PERSONAL = ("output", "weights_only", "trainer.logger")
"""Neither these, and a line says so: they write elsewhere, unpickle, or send what the user may send."""
WORDS = {
    *("best_metric", "best_mode", "trainer.precision", "trainer.gradient_clip_algorithm", "trainer.deterministic"),
    *("trainer.max_time", "trainer.accelerator", "trainer.strategy"),
    *("model.name", "model.task", "model.fields", "model.channels_last", "model.loss", "model.class_weights"),
    *("model.optimizer", "model.optimizer_args", "model.schedule", "model.metrics", "model.distillation"),
    *("model.teacher", "model.teacher_fields", "data.root", "data.train_split", "data.val_split", "data.val_list"),
    *("data.interpolation", "data.fit", "data.background", "data.backend", "data.worker_start", "data.train_crop"),
    *("data.auto_augment", "data.augment_ops", "data.mix_mode", "data.class_names", "data.balance"),
}
"""Settings in which a stranger's run may use words. None of them writes or sends anywhere, nor starts anything. Extras
add some, `LEARNT` in `cait.plugins`."""
STARTED = ("trainer.devices", "trainer.num_nodes", "data.num_workers")
"""Processes that a verb starts: a stranger's run may ask for one."""
NAME = re.compile(r"[\w.+-]*|timm/[\w.+-]+")
"""A word that is no path."""
PUBLIC = re.compile(r"(torch\.nn|torch\.optim|torchmetrics\.classification):[A-Z]\w*")
"""Classes that any run may name: no function is among them."""
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
        given: the options that the user typed of it.
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
    """Let a checkpoint that is loaded in the body name code, and its run's settings say anything, if `trusted`."""
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
    own = references.paths_in(signature.own_text(folder / rundir.CONFIG)) if folder else []
    for part in _parts(content):
        if isinstance(part, str) and references.is_path(part) and not (PUBLIC.fullmatch(part) or part in own):
            _refuse_code(path, part)


def as_data(
    config: Mapping[str, Any], known: Collection[str], path: Path, given: Sequence[str], own: bool, builds: bool
) -> dict[str, Any]:
    """The settings of a run that a verb may use; a line says which are left out.

    Args:
        config: as the file `path` holds it.
        known: every setting and group of settings, as "model" and "model.lr"; none means any.
        given: what the user typed; it counts in the place of what the run says.
        own: whether this account has signed the configuration, or the user trusts it: then it may name code.
        builds: whether the verb builds the Trainer's classes.

    Raises:
        UserError: a setting of a stranger's run names code.
    """
    replaced = {*PLACES, *(word.split("=")[0].removeprefix("--") for word in given if word.startswith("--"))}
    left_out: list[str] = []

    def takes(name: str, value: Any) -> bool:
        if name in replaced:
            return False
        built = _is_built(name, value)
        if name in PERSONAL or (built and not builds):
            taken = False
        elif own:
            taken = True
        else:
            for code in _code(value) or [str(value)] * built:
                _refuse_code(path, code)
            taken = may_say(name, value)
        left_out.extend([name] if value and not taken else [])
        return taken

    settings = {}
    for name, value in config.items():
        if isinstance(value, dict) and (not known or any(setting.startswith(f"{name}.") for setting in known)):
            settings[name] = {key: held for key, held in value.items() if takes(f"{name}.{key}", held)}
        elif takes(name, value):
            settings[name] = value
    if left_out:
        rank_zero_info(f"{path}: left out {printable(', '.join(left_out))}; on the command line they count")
    return settings


def may_say(name: str, value: Any) -> bool:
    """Whether a stranger's run may have this value, which names no code, in a setting."""
    if _trusted.get():
        return True
    if name in STARTED:
        return value in (None, "auto", "1", 0, 1)
    words = [part for part in _parts(value) if isinstance(part, str)]
    if name.startswith("model.") and not all(map(_is_name, words)):
        return False
    return not words or name in WORDS | plugins.learnt()


def _is_name(word: str) -> bool:
    return (NAME.fullmatch(word) or PUBLIC.fullmatch(word)) is not None


def _is_built(name: str, value: Any) -> bool:
    """Whether a setting makes the Trainer build a class: not if it is one of Lightning's words, such as "ddp"."""
    is_word = name in WORDS and isinstance(value, str) and re.fullmatch(r"[\w-]+", value)
    return bool(value) and name in {f"trainer.{setting}" for setting in BUILT} and not is_word


def _code(value: Any) -> list[str]:
    """What a setting would import or build, at any depth."""
    parts = [*_parts(value)]
    classes = [str(part["class_path"]) for part in parts if isinstance(part, dict) and "class_path" in part]
    return classes + [
        part for part in parts if isinstance(part, str) and references.is_path(part) and not PUBLIC.fullmatch(part)
    ]


def _refuse_code(path: Path, code: str) -> None:
    if not _trusted.get():
        raise UserError(f"{path} names {code}, code that may do anything: {REMEDY}")


def _parts(value: Any) -> Iterator[Any]:
    """A value and all that it contains."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(part)

"""What a run's configuration may do. The folder may be a stranger's, and a class path in it is code."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings

from cait import references, signature
from cait.errors import UserError
from cait.guards.configurations import config_files
from cait.run import rundir

PACKAGES = ("cait", "lightning", "torch", "torchmetrics", "torchvision")
"""A resumed run may name classes of these without --trust-config."""
BUILT = ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")
"""Settings of the Trainer that may name a class."""
PUBLIC = ("torch.nn", "torch.optim", "torchmetrics.classification")
"""A run may name the public classes of these as `package.module:name`; no function is among them."""
CLASS_PATH = re.compile(r"\b[^\W\d]\w*(?:\.[^\W\d]\w*)+")
REMEDY = "this account did not start the run, or config.yaml has changed since; if you trust it add --trust-config"


@contextlib.contextmanager
def only_importing(paths: Sequence[str], source: str, remedy: str) -> Iterator[None]:
    """While values are parsed, refuse every class path outside of `paths`, before it is imported.

    Raises:
        UserError: `source` names something else; the line ends with `remedy`.
    """
    try:
        with _parsing_settings(
            # jsonargparse also compares where an object is defined: it denies torch.os.system as posix.system.
            import_path_denylist=["*"],
            import_path_allowlist=[*paths],
            instantiate_subclass_spec_in_any=False,
        ):
            yield
    except UserError as error:
        denied = re.search(r"Importing '([^']+)' is not allowed", str(error.__cause__))
        if not denied:
            raise
        raise UserError(f"{source} names {denied[1]}, code that may do anything: {remedy}") from error


@contextlib.contextmanager
def _parsing_settings(**settings: Any) -> Iterator[None]:
    """Parse with other settings of jsonargparse, which has one set of them for the whole process."""
    before = dict(parsing_settings)
    set_parsing_settings(**settings)
    try:
        yield
    finally:
        parsing_settings.update(before)


def only_objects(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Refuse every part `package.module:name` that is neither in these arguments nor in `PUBLIC`."""
    return references.only([*references.paths_in(" ".join(arguments)), *_public()], REMEDY)


@contextlib.contextmanager
def only_known(settings: Sequence[str], given: Sequence[str], trusted: bool, builds: bool) -> Iterator[None]:
    """While a run's settings are used, refuse code that neither this account nor the command line names.

    Args:
        settings: the whole command line; its first configuration is the run's.
        given: what the user typed of it.
        trusted: whether --trust-config is given. Parts `package.module:name` are then free, and so are the classes of
            the Trainer if the verb `builds` them; otherwise only the command line may name such a class.
        builds: whether the verb takes the Trainer's classes from the configuration.
    """
    configs = config_files(settings)
    signed = [signature.own_text(path) for path in configs]
    with contextlib.ExitStack() as limits:
        if not builds:
            limits.enter_context(only_importing(named(given), "the configuration", "give it on the command line"))
        elif not (trusted or signed[0]):
            paths = [*PACKAGES, *named(given)]
            limits.enter_context(only_importing(paths, str(configs[0]), "if you trust it add --trust-config"))
        if not trusted:
            limits.enter_context(only_objects([*given, *signed]))
        yield


@contextlib.contextmanager
def only_own(folder: Path | None, trusted: bool = False) -> Iterator[None]:
    """While a checkpoint is loaded, refuse code that no config.yaml signed by this account names; `trusted` lifts that.

    The checkpoint says how Lightning builds the module: by itself jsonargparse would make an object of any value
    with a "class_path".
    """
    if trusted:
        yield
        return
    signed = signature.own_text(folder / rundir.CONFIG) if folder else ""
    with only_importing([*PACKAGES, *CLASS_PATH.findall(signed)], "the checkpoint", REMEDY), only_objects([signed]):
        yield


def _public() -> list[str]:
    modules = {path: importlib.import_module(path) for path in PUBLIC}
    return [
        f"{path}:{name}"
        for path, module in modules.items()
        for name in getattr(module, "__all__", ())
        if isinstance(getattr(module, name, None), type)
    ]


def named(arguments: Sequence[str]) -> list[str]:
    """Class paths that the command line itself gives to the Trainer."""
    option = re.compile(rf"--trainer\.({'|'.join(BUILT)})\b")
    pairs = pairwise([*arguments, ""])
    values = [argument.partition("=")[2] or following for argument, following in pairs if option.match(argument)]
    return CLASS_PATH.findall(" ".join(values))


def plain(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the settings that build no object, write nothing elsewhere and unpickle nothing, names of those left out)"""
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    built = {name: trainer[name] for name in BUILT if name in trainer and not _is_word(name, trainer[name])}
    kept = {name: value for name, value in config.items() if name not in ("output", "weights_only")}
    if trainer:
        kept["trainer"] = {name: value for name, value in trainer.items() if name not in built}
    left_out = [f"trainer.{name}" for name, value in built.items() if value]
    return kept, left_out + ["output"] * bool(config.get("output"))


def _is_word(name: str, value: Any) -> bool:
    """Whether it is the name of one of Lightning's accelerators or strategies."""
    return name in ("accelerator", "strategy") and isinstance(value, str) and bool(re.fullmatch(r"[\w-]+", value))

"""What a run's configuration may do. The folder may be a stranger's, and a class path in it is code."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings

from cait import references, signature
from cait.errors import UserError
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
    before = dict(parsing_settings)
    # jsonargparse also compares where an object is defined: by default it denies torch.os.system as posix.system.
    set_parsing_settings(
        import_path_denylist=["*"], import_path_allowlist=[*paths], instantiate_subclass_spec_in_any=False
    )
    try:
        yield
    except UserError as error:
        denied = re.search(r"Importing '([^']+)' is not allowed", str(error.__cause__))
        if not denied:
            raise
        raise UserError(f"{source} names {denied[1]}, code that may do anything: {remedy}") from error
    finally:
        parsing_settings.update(before)


def only_objects(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Refuse every part `package.module:name` that is neither in these arguments nor in `PUBLIC`."""
    given = references.paths_in(" ".join(arguments))
    return references.only([*given, *_public()], REMEDY)


@contextlib.contextmanager
def only_own(folder: Path | None) -> Iterator[None]:
    """While a checkpoint is loaded, refuse code that a config.yaml signed by this account does not name.

    The checkpoint says how Lightning builds the module: by itself jsonargparse would make an object of any value
    with a "class_path".
    """
    own = signature.own_text(folder / rundir.CONFIG) if folder else ""
    with only_importing([*PACKAGES, *CLASS_PATH.findall(own)], "the checkpoint", REMEDY), only_objects([own]):
        yield


def _public() -> list[str]:
    modules = {name: importlib.import_module(name) for name in PUBLIC}
    return [
        f"{name}:{thing}"
        for name, module in modules.items()
        for thing in getattr(module, "__all__", ())
        if isinstance(getattr(module, thing, None), type)
    ]


def named(arguments: Sequence[str]) -> list[str]:
    """Class paths that the command line itself gives to the Trainer."""
    option = re.compile(rf"--trainer\.({'|'.join(BUILT)})\b")
    values = [
        argument.partition("=")[2] or following
        for argument, following in zip(arguments, [*arguments, ""][1:], strict=True)
        if option.match(argument)
    ]
    return CLASS_PATH.findall(" ".join(values))


def configurations(arguments: Sequence[str]) -> list[Path]:
    """The files that --config names."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [path for before, argument in pairs if (path := _configuration(before, argument))]


def _configuration(before: str, argument: str) -> Path | None:
    """The file that an argument names for --config, with the argument `before` it."""
    if argument.startswith("--config="):
        return Path(argument.removeprefix("--config="))
    return Path(argument) if before in ("-c", "--config") else None


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

"""A first look at what `fit`, `resume` and `eval` are given. It refuses only what the verb would certainly refuse.

The lines are those of the verb itself: what jsonargparse would say goes through `refusals.explain` too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cait import ckpt, plugins
from cait.data.digits import ROOT
from cait.data.folder import FolderSource, Splits
from cait.errors import UserError
from cait.extras.first_look.names import NotCertainError, settings
from cait.guards import configurations
from cait.guards.configurations import LINKED, check_run_name, join_values, options
from cait.references import is_path
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, flatten, group

SPLITS = ("root", "train_split", "val_split")
OPTIONS = ("-h", "--help", "--print_config", "--trust-config", "--trust_config")
"""Options of `fit` and `eval` that are no settings."""


def look(verb: str, arguments: list[str], program: Program) -> None:
    """Raise UserError if an argument is certainly wrong: a setting, a configuration, or a file that is not there."""
    configs: list[str] = []
    if verb == "resume" or (verb == "eval" and arguments and not arguments[0].startswith("-")):
        run, arguments = arguments[:1], arguments[1:]
        folders = [folder for name in run for folder in (rundir.LOGS / name, Path(name)) if name and folder.is_dir()]
        if not folders:  # the verb says it, as early
            return
        configs = [f"--config={folders[0] / rundir.CONFIG}"]
    words = join_values(arguments)
    if any(word.split("=")[0] in ("-h", "--help") or word.split("=")[0].endswith(".help") for word in words):
        return
    kind = "eval" if verb == "eval" else "fit"
    known = _known(kind, program)
    typed = [kind, *arguments]
    if known and verb == "fit" and words and not words[0].startswith("-"):
        raise _refusal(f"unrecognized arguments: {words[0]}", typed, known)
    given: Settings = {}
    for option, text in options([*configs, *words]):
        if " " in option or f"--{option}" in OPTIONS:
            continue
        name = option.removesuffix("+")
        if option == "config":
            given |= _configuration(text, typed, known) if text else {}
        elif known and not _is_setting(name, known):
            raise _refusal(f"unrecognized arguments: --{option}", typed, known)
        elif text in (None, "null", ""):
            given.pop(name, None)
        else:
            given[name] = text
    if "--print_config" not in {word.split("=")[0] for word in words}:
        _check_places(given, verb)
        is_named = "data.root" in given or (verb == "fit" and not words)
        if program.data is None and is_named and "data" not in given:
            _check_root({name: given[f"data.{name}"] for name in SPLITS if f"data.{name}" in given})


def _refusal(message: str, typed: list[str], known: list[str]) -> UserError:
    """The error for what jsonargparse would say."""
    from cait.guards import refusals

    return UserError(refusals.explain(message, typed, known))


def _known(kind: str, program: Program) -> list[str]:
    """The settings; none if somebody else's classes or options may add some."""
    if program.module or program.data:
        return []
    replacing = [extra for extra in plugins.extras().values() if hasattr(extra, "replace_arguments")]
    if not all(hasattr(extra, "REPLACED") for extra in replacing):
        return []
    try:
        return settings(kind)
    except NotCertainError:
        return []


def _is_setting(name: str, known: list[str]) -> bool:
    """Whether this may be a setting, or a part of one that is made of parts, as "trainer.callbacks.monitor"."""
    if name in known or name in LINKED or any(name in names for names in plugins.of_kind("REPLACED")):
        return True
    groups = {each.partition(".")[0] for each in known if "." in each}
    parts = name.split(".")
    wholes = (".".join(parts[:count]) for count in range(1, len(parts)))
    return any(whole in known and whole not in groups for whole in wholes)


def _configuration(value: str, typed: list[str], known: list[str]) -> Settings:
    """The settings of a configuration, by name.

    Raises:
        UserError: there is no such file, it is not YAML, or it has a setting that nobody takes.
    """
    path = Path(value)
    if len(path.name) > 255 or set(value) & set("{}[]:#\n"):  # YAML itself
        return {}
    if not path.is_file():
        is_missing = path.suffix in (".yaml", ".yml") and path.name != rundir.CONFIG  # of a run the verb says more
        if is_missing or path.is_dir():
            raise _refusal(f"Parser key \"config\": not a file: '{path}'", typed, known)
        return {}
    if path.name == rundir.CONFIG:  # settings of extras that are gone are left out
        from cait.cli import saved

        return flatten(saved.read(path))
    found = flatten(configurations.settings(path))
    for name in found:
        if known and isinstance(name, str) and not _is_setting(name, known):
            raise _refusal(f"does not accept option '{name}'", typed, known)
    return found


def _check_places(given: Settings, verb: str) -> None:
    """Raise UserError if a run's name cannot be one, or a file that is read is not there."""
    if verb == "fit" and isinstance(given.get("run_name"), str):
        check_run_name(given["run_name"])
    if isinstance(path := given.get("ckpt_path"), str):
        ckpt.check_exists(path)
    if isinstance(path := given.get("model.weights"), str) and Path(path).suffix != ".ckpt":  # that may be a folder
        ckpt.check_weights(Path(path))


def _check_root(data: dict[str, Any]) -> None:
    """Raise UserError if the images are to come from a folder that cannot be used."""
    try:
        splits: Splits = group(Splits, data)
    except (UserError, TypeError):
        return
    root = splits.root
    if is_path(root) and not Path(root).is_dir():
        return
    if not all(isinstance(value, str) for value in data.values()) or Path(root) == ROOT:
        return
    if "://" not in root and all(offer(root, {"root": root}) is None for offer in plugins.of_kind("open_source")):
        FolderSource(splits).split_folders()

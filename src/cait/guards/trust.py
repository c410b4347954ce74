"""What the files of a run may do without leave: a run's folder may be a stranger's.

A run that names no code needs no leave. One that does needs --trust-config, unless this account has signed its
config.yaml as it is. `code_in` says what names code; what is `PUBLIC` does not. `resume` and `eval` take all of
config.yaml. Other verbs take the weights, the names of the classes, where the images are and how they are prepared.
"""

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cait
from cait import references, signature
from cait.errors import UserError
from cait.guards import configurations
from cait.run import rundir
from cait.settings import Settings, flatten, listed

PUBLIC = re.compile(
    r"(torch\.nn|torch\.optim|torchmetrics\.classification):[A-Z]\w*"
    r"|cait\.extras\.\w+\.planes:read|cait\.train\.module:CaiTModule"
)
"""Classes that any run may name: no function is among them but the readers of extras."""
FILES = ("config", "data", "ema", "model", "trainer")
"""Settings that, where they are text, name a file of settings."""
MOST_SIDE = 1024
"""Pixels of an image's side that needs no leave: the memory of a small network grows with its square."""
ELSEWHERE = re.compile(r"data\.data_dir|\w+_args\b")
"""Settings that say where a run writes or sends something: arguments of what an extra calls are among them."""
REMEDY = "this account has not signed config.yaml as it is; if you trust it add --trust-config"
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextlib.contextmanager
def only_own(trusted: bool) -> Iterator[None]:
    """Take the runs that are read in the body for the user's own if `trusted`, that is if --trust-config is given."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_own(text: str) -> bool:
    """Whether a run is the user's own, by the text of its configuration."""
    return _trusted.get() or signature.is_own(text)


def settings(
    path: Path, of_first: Callable[..., str] = operator.call, is_run: bool = False
) -> Settings:
    """The settings in a file of --config, read once: what is checked is what is used.

    `of_first` gives every process what the function returns in the first, which alone needs the key then. Raises
    UserError if it is a run's config.yaml that names code, and is not the user's own. `is_run` says that it is a run's,
    whatever lies beside it.
    """
    text = configurations.read_text(path)
    needs_no_leave = True
    if is_run or rundir.is_of_run(path):
        text, needs_no_leave = json.loads(of_first(lambda: json.dumps([text, is_own(text)])))
    config = configurations.settings(path, text)
    if not needs_no_leave:
        _refuse(path, code_of_run(config))
    return config


def check_code(path: Path, content: Any, folder: Path | None) -> None:
    """Refuse a value of the file `path` that names code which the config.yaml in `folder`, if signed, does not name.

    The error is a UserError. With --trust-config there is none.
    """
    if _trusted.get():
        return
    signed = signature.own_text(folder / rundir.CONFIG) if folder else ""
    known = {*code_in(configurations.load(signed, path))}
    _refuse(path, (name for name in code_in(content) if name not in known))


def _refuse(path: Path, names: Iterable[str]) -> None:
    listed = ", ".join(dict.fromkeys(name[:100] for name in names if not is_of_project(name)))
    if listed:
        raise UserError(f"{path} names {listed}, which may do anything: {REMEDY}")


def is_of_project(name: str) -> bool:
    """Whether a text names a class or a function that a file of a package in `src` of the working folder defines.

    A pyproject.toml lies beside `src`. Runs of one's own project need no trust on another machine. What the file has
    imported, as "mine.parts:system", is not the project's; nor is this package in its own clone.
    """
    names = re.fullmatch(r"((\w+)(?:\.\w+)*)[.:](\w+)", name)
    if names is None or not Path("pyproject.toml").is_file():
        return False
    module, package, defined = names.groups()
    if package == cait.__name__ or not Path("src", package, "__init__.py").is_file():
        return False
    path = Path("src", *module.split("."))
    files = filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    # The name is looked for in the text: an import would run the file.
    definition = re.compile(rf"^(class|def) {defined}\b", re.MULTILINE)
    return any(map(definition.search, map(configurations.read_text, files)))


def code_of_run(config: Settings) -> Iterator[str]:
    """What a run's settings name that is code, as `code_in`, and where they would write or send something."""
    yield from code_in(config)
    for name, value in flatten(config).items():
        setting = name.rstrip("+").removeprefix("trainer.")
        is_class = setting in (*FILES, *configurations.CLASSES)
        for text in listed(value):
            if isinstance(text, str) and (
                is_class or (setting in configurations.WORDS and "." in text)
            ):
                yield text
        if value and ELSEWHERE.match(name):
            yield f"{name} {value}"


def code_in(value: Any) -> Iterator[str]:
    """What a value, as `disk.plain` gives it, names that could be imported, at any depth, and an image of any size.

    It is named as `package.module:name`, or below a `class_path`, for which LightningCLI looks. Its parser takes a key
    `a.b` for b within a, and reads text of some settings as YAML, where a backslash may stand for any letter.
    """
    if isinstance(value, dict):
        yield from (str(item) for key, item in value.items() if _may_hide(str(key)))
        side = value.get("img_size")
        if isinstance(side, int) and side > MOST_SIDE:
            yield f"img_size {side}"
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from code_in(item)
    elif (
        isinstance(value, str)
        and (references.is_path(value) or _may_hide(value))
        and not PUBLIC.fullmatch(value)
    ):
        yield value


def _may_hide(text: str) -> bool:
    return "class_path" in text or "\\" in text

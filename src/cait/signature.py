"""Which runs are your own, and what files of others may name.

`cait fit` signs a run's config.yaml with a key that only your account can read. `code_in` says what names code; what is
`PUBLIC` does not.
"""

import contextlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

import cait
from cait import ckpt, disk, references
from cait.errors import UserError

CONFIG = "config.yaml"
"""In the folder of a run."""
MARK = "# signed "
"""Begins the last line of a configuration; a digest follows."""
BYTES = 32
"""Length of a key."""
PUBLIC = re.compile(
    r"(torch\.nn|torch\.optim|torchmetrics\.classification):[A-Z]\w*"
    r"|cait\.extras\.\w+\.planes:read|cait\.train\.module:CaiTModule"
)
"""Classes that any run may name: no function is among them but the readers of extras."""
MOST_SIDE = 1024
"""Pixels of an image's side that needs no leave: the memory of a small network grows with its square."""
REMEDY = (
    "this account has not signed config.yaml as it is; if you trust it add --trust-config, "
    "in Python cait.load(..., trust_config=True)"
)
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def signed(text: str) -> str:
    """A configuration with its signature; without one where no key can be kept."""
    key = _key(make=True)
    return f"{text}{MARK}{_digest(key, text)}\n" if key else text


def is_own(text: str) -> bool:
    """Whether this account has signed a configuration, and nobody has changed it since; all are with --trust-config."""
    body, _, digest = text.rpartition(MARK)
    key = _key()
    return _trusted.get() or (
        bool(key) and hmac.compare_digest(digest.strip().encode(), _digest(key, body).encode())
    )


def own_text(folder: Path) -> str:
    """The text of a run's configuration if this account has signed it, else ""."""
    try:
        text = disk.read_text(folder / CONFIG)
    except (OSError, UserError):
        return ""
    return text if is_own(text) else ""


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _key(make: bool = False) -> bytes:
    """This account's key, in a file that one process makes for all; empty where there is none."""
    try:
        path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cait" / "key"
        if make and not path.exists():
            _make_key(path)
        with disk.open_file(path, BYTES) as file:
            key = file.read()
    except (OSError, RuntimeError, UserError):  # no home, or nothing can be written there
        return b""
    return key if len(key) == BYTES else b""


def _make_key(path: Path) -> None:
    with disk.file_lock(path.with_name("lock")):
        if not path.exists():  # another process may have been first
            with disk.atomic_write(path) as beside:
                beside.touch(0o600)
                beside.write_bytes(secrets.token_bytes(BYTES))


@contextlib.contextmanager
def only_own(trusted: bool) -> Iterator[None]:
    """Take the runs that are read in the body for the user's own if `trusted`, that is if --trust-config is given."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


class ReadsData:
    """Comes before a class of Lightning's, whose own `load_from_checkpoint` imports what the file names."""

    @classmethod
    def load_from_checkpoint(
        cls: Any, checkpoint_path: Any, *args: Any, weights_only: Any = True, **settings: Any
    ) -> Any:
        """Lightning's, for a file on a disk. Raises UserError if settings in it name code, see `check_code`.

        With `weights_only=False` you trust the file.
        """
        if weights_only is not False:
            checkpoint = ckpt.read_checkpoint(checkpoint_path)
            # Lightning's first versions had other keys
            keys = (cls.CHECKPOINT_HYPER_PARAMS_KEY, "hparams", "module_arguments")
            folder = Path(checkpoint_path).absolute().parents[1]
            check_code(checkpoint_path, [*map(checkpoint.get, keys)], folder)
        return super().load_from_checkpoint(  # type: ignore[misc]
            checkpoint_path, *args, weights_only=weights_only, **settings
        )


def check_code(path: Path, content: Any, folder: Path | None) -> None:
    """Refuse a value of the file `path` that names code which the config.yaml in `folder`, if signed, does not name.

    The error is a UserError. With --trust-config there is none.
    """
    if _trusted.get():
        return
    signed = own_text(folder) if folder else ""
    known = {*code_in(yaml.load(signed, yaml.CSafeLoader))}
    refuse(path, (name for name in code_in(content) if name not in known))


def refuse(path: Path, names: Iterable[str]) -> None:
    """Raise UserError if there are names of code that is not the project's."""
    listed = ", ".join(dict.fromkeys(name[:100] for name in names if not is_of_project(name)))
    if listed:
        raise UserError(f"{path} names {listed}, which may do anything: {REMEDY}")


def is_of_project(name: str) -> bool:
    """Whether a text names what a file of a package in `src` of the working folder defines.

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
    definition = re.compile(rf"^((class|def) {defined}\b|{defined} *(:.*)?=.*\()", re.MULTILINE)
    return any(map(definition.search, map(disk.read_text, files)))


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

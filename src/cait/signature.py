"""Which runs are your own: `cait fit` signs a run's config.yaml with a key that only your account can read."""

import hmac
import os
import secrets
from pathlib import Path

from cait import disk
from cait.errors import UserError

MARK = "# signed "
"""Begins the last line of a configuration; a digest follows."""
BYTES = 32
"""Length of a key."""


def signed(text: str) -> str:
    """A configuration with its signature; without one where no key can be kept."""
    key = _key(make=True)
    return f"{text}{MARK}{_digest(key, text)}\n" if key else text


def is_own(text: str) -> bool:
    """Whether this account has signed the configuration, and nobody has changed it since."""
    body, _, digest = text.rpartition(MARK)
    key = _key()
    return bool(key) and hmac.compare_digest(digest.strip().encode(), _digest(key, body).encode())


def own_text(path: Path) -> str:
    """The text of the configuration at `path` if this account has signed it, else ""."""
    try:
        text = disk.read_text(path)
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

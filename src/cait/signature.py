"""Which runs are your own: `cait fit` signs what a run says of itself with a key that only your account can read."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import sys
from pathlib import Path

from cait import disk
from cait.errors import UserError

SIGNATURE = ".signature"
"""File in a run's folder: a line for each text that was signed, the name of its file and a digest."""
BYTES = 32
"""Of a key."""


def sign(path: Path, *texts: str) -> None:
    """Sign these texts for the file `path`, in place of earlier ones; nothing is signed where no key can be kept."""
    if key := _key():
        kept = [line for line in _lines(path) if not line.startswith(f"{path.name} ")]
        signed = [f"{path.name} {_digest(key, path, text)}" for text in texts]
        with contextlib.suppress(OSError), disk.whole(path.with_name(SIGNATURE)) as beside:
            beside.write_text("\n".join([*kept, *signed]))


def is_own(path: Path, text: str) -> bool:
    """Whether this account has signed `text` for the file `path`."""
    key = _key()
    wanted = f"{path.name} {_digest(key, path, text)}".encode()
    return bool(key) and any(hmac.compare_digest(wanted, line.encode()) for line in _lines(path))


def own_text(path: Path) -> str:
    """The text of the file `path` if this account has signed it, else ""."""
    try:
        text = disk.read_text(path)
    except (OSError, UserError):
        return ""
    return text if is_own(path, text) else ""


def _lines(path: Path) -> list[str]:
    try:
        return disk.read_text(path.with_name(SIGNATURE)).splitlines()
    except (OSError, UserError):
        return []


def _digest(key: bytes, path: Path, text: str) -> str:
    return hmac.new(key, f"{path.name}\0{text}".encode(errors="surrogateescape"), "sha256").hexdigest()


def _key() -> bytes:
    """This account's key, made on first use; empty where none can be kept. A damaged one is replaced, which is said."""
    try:
        path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cait" / "key"
        if path.exists() and len(_read(path)) < BYTES:
            print(f"{path} holds no key, and is replaced; what it signed needs --trust-config", file=sys.stderr)
            path.unlink()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = disk.scratch(path)
            with os.fdopen(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(BYTES))
            try:
                os.link(beside, path)
            except FileExistsError:  # of two processes that do so at once, one's key stays
                pass
            except OSError:  # a file system without links
                beside.replace(path)
            beside.unlink(missing_ok=True)
        return _read(path)
    except (OSError, RuntimeError, UserError):  # no home, or nothing can be written there
        return b""


def _read(path: Path) -> bytes:
    with disk.open_file(path, 1 << 10) as file:
        return file.read()

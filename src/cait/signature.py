"""Which runs are your own: `cait fit` signs a run's configuration with a key that only your account can read."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from cait import disk

SIGNATURE = ".signature"


def sign(config: Path, *texts: str) -> None:
    """Sign these texts for the file `config`; nothing is signed where no key can be kept."""
    if key := _key():
        with contextlib.suppress(OSError), disk.whole(config.with_name(SIGNATURE)) as beside:
            beside.write_text("\n".join(_digest(key, text) for text in texts))


def is_own(config: Path, text: str) -> bool:
    """Whether this account has signed `text` for the file `config`."""
    try:
        signatures = config.with_name(SIGNATURE).read_text().split()
    except (OSError, UnicodeDecodeError):
        return False
    key = _key()
    return bool(key) and any(hmac.compare_digest(_digest(key, text), found) for found in signatures)


def own_text(config: Path) -> str:
    """The text of `config` if this account has signed it, else ""."""
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if is_own(config, text) else ""


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _key() -> bytes:
    """This account's key, made on first use; empty where it cannot be kept."""
    try:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cait"
        folder.mkdir(parents=True, exist_ok=True)
        path, flags = folder / "key", os.O_CREAT | os.O_EXCL | os.O_WRONLY
        with contextlib.suppress(FileExistsError), os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        return path.read_bytes()
    except (OSError, RuntimeError):  # no home
        return b""

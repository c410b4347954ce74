"""The name of a data set."""

from __future__ import annotations

from pathlib import Path


def root_name(root: str) -> str:
    """A data set's root in one spelling: `DIR/`, as a shell completes it, is `DIR`."""
    return root.rstrip("/") if "://" in root else str(Path(root))

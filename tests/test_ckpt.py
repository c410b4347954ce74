"""Checkpoints that are folders are read by an extra; without one they are refused in a line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cait import plugins


@pytest.fixture
def no_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the folder of extras were empty."""
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "none")
    plugins.extras.cache_clear()
    yield
    plugins.extras.cache_clear()

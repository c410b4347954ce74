"""A long listing of images is kept for the next start; without this folder every start lists them anew."""

from __future__ import annotations

from typing import Any


def list_images(folder: Any, names: Any, pool: Any) -> Any:
    from cait.extras.listings import kept

    return kept.list_images(folder, names, pool)

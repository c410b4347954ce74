"""Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cait.cli.loading import load
    from cait.data.datamodule import ImageNetDataModule
    from cait.model.network import create_model
    from cait.train.module import CaiTModule

__version__ = "0.1.0"
__all__ = ["CaiTModule", "ImageNetDataModule", "create_model", "load"]

# Imported on first use: Lightning takes seconds to import, and `create_model` needs torch alone.
_HOME = {
    "create_model": "cait.model.network",
    "CaiTModule": "cait.train.module",
    "ImageNetDataModule": "cait.data.datamodule",
    "load": "cait.cli.loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'cait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

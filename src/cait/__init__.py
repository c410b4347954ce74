"""Train CaiT, "Going deeper with Image Transformers", with PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cait.cli.api import fit
    from cait.cli.loading import load
    from cait.data.datamodule import ImageNetDataModule
    from cait.model.network import create_model
    from cait.train.module import CaiTModule

__version__ = "0.1.0"
__all__ = ["CONFIGS", "CaiTModule", "ImageNetDataModule", "create_model", "fit", "load"]

_FOLDER = Path(__file__).resolve().parent
IS_INSTALLED = (_FOLDER / "configs").is_dir()
"""Whether this is an installed wheel, which brings the configurations; a clone has a Makefile too."""
CONFIGS = (_FOLDER if IS_INSTALLED else _FOLDER.parents[1]) / "configs"
"""The configurations that `--config` finds from any folder."""

# Imported on first use: Lightning takes seconds to import, and `create_model` needs torch alone.
_HOME = {
    "create_model": "cait.model.network",
    "CaiTModule": "cait.train.module",
    "ImageNetDataModule": "cait.data.datamodule",
    "fit": "cait.cli.api",
    "load": "cait.cli.loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'cait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

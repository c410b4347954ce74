"""What a network is called on the screen and on pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cait.model.config import VARIANTS


def network_name(name: str, fields: Any = None) -> str:
    """A network by its settings: "xxs24", "CaiT 6×96", "timm/vit_small_patch16_224".

    A CaiT has the name of the paper's model with its depth and width; if there is none, it is "CaiT depth×width".

    Args:
        name: the setting `model.name`.
        fields: the setting `model.fields`; anything that is no mapping counts as none.
    """
    if name not in VARIANTS:
        return name
    size = [
        {**VARIANTS[name], **(fields if isinstance(fields, Mapping) else {})}[key] for key in ("depth", "embed_dim")
    ]
    sizes = {variant: [row["depth"], row["embed_dim"]] for variant, row in VARIANTS.items()}
    return next((variant for variant, known in sizes.items() if known == size), "CaiT {}×{}".format(*size))

"""Names and times as screens and pages show them."""

from pathlib import Path

from cait.model.config import VARIANTS
from cait.settings import Settings


def network_name(name: str, fields: Settings | None = None) -> str:
    """A network by its settings `model.name` and `model.fields`: "xxs24", "CaiT 6×96", "timm/vit_small_patch16_224".

    A CaiT has the name of the paper's model with its depth and width; if there is none, it is "CaiT depth×width".
    """
    if name not in VARIANTS:
        return name
    settings = VARIANTS[name] | (fields or {})
    depth = settings["depth"]
    width = settings["embed_dim"]
    for variant, row in VARIANTS.items():
        if (row["depth"], row["embed_dim"]) == (depth, width):
            return variant
    return f"CaiT {depth}×{width}"


def root_name(root: str) -> str:
    """A data set's root in one spelling: `DIR/`, as a shell completes it, is `DIR`."""
    return root.rstrip("/") if "://" in root else str(Path(root))


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 5 s", "3 h 4 min" or "5 d 6 h"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

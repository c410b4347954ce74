"""`create_model`: one of the paper's networks by its name."""

from __future__ import annotations

from typing import Any

from cait.model.cait import CaiT
from cait.model.config import variant_config
from cait.model.weights import load_pretrained


def create_model(
    name: str,
    img_size: int = 224,
    num_classes: int = 1000,
    drop_path_rate: float | None = None,
    *,
    pretrained: bool = False,
    **fields: Any,
) -> CaiT:
    """Build one of the paper's models, with fresh weights or the ones that timm publishes.

    Args:
        name: a row of `cait.model.config.VARIANTS`: xxs24, xxs36, xs24, xs36, s24, s36, s48, m24, m36, m48.
        img_size: side of the square input in pixels, a multiple of the patch size.
        num_classes: width of the head.
        drop_path_rate: stochastic depth; None takes the paper's rate for this model.
        pretrained: load timm's weights of this model from the Hugging Face hub; see
            `cait.model.weights.load_pretrained`.
        fields: any other field of `cait.model.config.CaiTConfig`.

    Raises:
        UserError: unknown name or field, sizes that do not fit together, or weights that cannot be loaded.
    """
    config = variant_config(name, img_size=img_size, num_classes=num_classes, drop_path_rate=drop_path_rate, **fields)
    model = CaiT(config)
    if pretrained:
        load_pretrained(model, name)
    return model

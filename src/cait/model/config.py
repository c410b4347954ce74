"""What a CaiT is, as plain data: the fields of the network and the paper's ten models.

Source: "Going deeper with Image Transformers" (arXiv 2103.17239), Table 3 and section 5.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from cait.errors import UserError


@dataclass(frozen=True)
class CaiTConfig:
    """The fields of one network; `layer_scale_init=None` means the paper's rule for the depth."""

    img_size: int = 224
    patch_size: int = 16
    in_chans: int = 3
    num_classes: int = 1000
    embed_dim: int = 192
    depth: int = 24
    """Number of self-attention blocks; the class token is not among their tokens."""
    depth_token_only: int = 2
    """Number of class-attention blocks; only the class token is updated in them."""
    num_heads: int = 4
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    drop_path_rate: float = 0.0
    """Probability of dropping a residual branch, the same in every self-attention block, 0 in class attention."""
    layer_scale_init: float | None = None

    def __post_init__(self) -> None:
        for name in ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "num_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("depth", "depth_token_only"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"{name} must be a whole number of at least 0, got {value!r}")
        if self.img_size % self.patch_size:
            raise UserError(f"img_size {self.img_size} is not a multiple of patch_size {self.patch_size}")
        if self.embed_dim % self.num_heads:
            raise UserError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}")
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise UserError(f"drop_path_rate must be in [0, 1), got {self.drop_path_rate}")

    @property
    def epsilon(self) -> float:
        """LayerScale's initial value: the given one, else by the paper's rule for the total depth.

        The rule: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 deeper.
        """
        if self.layer_scale_init is not None:
            return self.layer_scale_init
        return 0.1 if self.depth <= 18 else 1e-5 if self.depth <= 24 else 1e-6

    @property
    def num_patches(self) -> int:
        return (self.img_size // self.patch_size) ** 2


# XXS-36 is the one exception to the rule for ε: the released code and weights use 1e-5.
VARIANTS: dict[str, dict[str, Any]] = {
    "xxs24": dict(embed_dim=192, num_heads=4, depth=24, drop_path_rate=0.05),
    "xxs36": dict(embed_dim=192, num_heads=4, depth=36, drop_path_rate=0.1, layer_scale_init=1e-5),
    "xs24": dict(embed_dim=288, num_heads=6, depth=24, drop_path_rate=0.05),
    "xs36": dict(embed_dim=288, num_heads=6, depth=36, drop_path_rate=0.1),
    "s24": dict(embed_dim=384, num_heads=8, depth=24, drop_path_rate=0.1),
    "s36": dict(embed_dim=384, num_heads=8, depth=36, drop_path_rate=0.2),
    "s48": dict(embed_dim=384, num_heads=8, depth=48, drop_path_rate=0.3),
    "m24": dict(embed_dim=768, num_heads=16, depth=24, drop_path_rate=0.2),
    "m36": dict(embed_dim=768, num_heads=16, depth=36, drop_path_rate=0.3),
    "m48": dict(embed_dim=768, num_heads=16, depth=48, drop_path_rate=0.4),
}


def variant_config(name: str, **fields: Any) -> CaiTConfig:
    """The configuration of a named variant, with `fields` put over its row.

    A field given as None keeps the row's value. When `depth` is changed, ε follows the new depth.

    Raises:
        UserError: the name is not one of the ten, or a field does not exist.
    """
    if name not in VARIANTS:
        raise UserError(f"unknown model {name!r}; choose one of {', '.join(VARIANTS)}")
    known = [field.name for field in dataclasses.fields(CaiTConfig)]
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(known)}"
            raise UserError(f"unknown model field {field!r}{hint}")
    given = {key: value for key, value in fields.items() if value is not None}
    row = dict(VARIANTS[name])
    if "depth" in given:
        row.pop("layer_scale_init", None)
    return CaiTConfig(**{**row, **given})

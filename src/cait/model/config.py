"""A CaiT as plain data: the fields of the network and the paper's ten models.

Source: "Going deeper with Image Transformers" (arXiv 2103.17239).
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from cait import plugins
from cait.errors import UserError, did_you_mean
from cait.settings import Group, In, NonNegativeInt, PositiveInt, Settings, ShareBelow1, names_in

DropPathMode = Literal["mask", "skip"]
FiniteFloat = Annotated[float, In("(-inf, inf)")]


@dataclass(frozen=True)
class CaiTConfig(Group):
    """The fields of one network. The defaults build XXS-24 as published."""

    network: ClassVar[str] = "cait.model.cait:CaiT"
    """The class that takes these fields; and the one that makes tokens of images."""
    patches: ClassVar[str] = "cait.model.cait:PatchEmbed"

    img_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    in_chans: PositiveInt = 3
    num_classes: PositiveInt = 1000
    embed_dim: PositiveInt = 192
    depth: NonNegativeInt = 24
    """Number of self-attention blocks."""
    depth_token_only: PositiveInt = 2
    """Number of class-attention blocks, which update only the class token."""
    num_heads: PositiveInt = 4
    mlp_ratio: FiniteFloat = 4.0
    qkv_bias: bool = True
    layer_scale_init: FiniteFloat | None = None
    """ε of LayerScale; None means the paper's rule for the depth."""
    drop_path_rate: ShareBelow1 = 0.0
    """Probability of dropping a residual branch of each self-attention block; 0 in class attention."""
    drop_path_mode: DropPathMode = "skip"
    """Multiply dropped branches by 0, or do not compute them; see `cait.model.residual.DropPath`."""
    attention_backend: str = "default"
    """How attention with talking heads is computed: "reference", or a name that an extra adds; see
    `cait.model.attention.backend_named`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.img_size % self.patch_size:
            raise UserError(
                f"img_size {self.img_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise UserError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}"
            )
        if self.embed_dim * self.mlp_ratio < 1:
            raise UserError(f"mlp_ratio {self.mlp_ratio:g} leaves no hidden channels: raise it")

    @property
    def epsilon(self) -> float:
        """The initial value of LayerScale; the paper's rule follows the depth."""
        if self.layer_scale_init is not None:
            return self.layer_scale_init
        return 0.1 if self.depth <= 18 else 1e-5 if self.depth <= 24 else 1e-6

    @property
    def num_patches(self) -> int:
        return (self.img_size // self.patch_size) ** 2


# XXS-36 is the one exception to the rule for ε: the released code and weights use 1e-5.
VARIANTS: dict[str, Settings] = {
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
    """The configuration of a named variant; `fields` that are not None replace values of its row.

    When `depth` is changed, ε follows the new depth. Raises UserError if a field does not exist.
    """
    row = dict(VARIANTS[name])
    chosen = {key: value for key, value in fields.items() if value is not None}
    if chosen.get("depth", row["depth"]) != row["depth"]:
        row.pop("layer_scale_init", None)
    return config_class(fields)(**row | chosen)


def config_class(fields: Collection[str]) -> type[CaiTConfig]:
    """The class that has these fields: `CaiTConfig`, or an extra's subclass of it, or those of several extras in one.

    Raises UserError if there is no such field.
    """
    ours = {*names_in(CaiTConfig)}
    if ours.issuperset(fields):
        return CaiTConfig
    groups = plugins.groups("fields")
    known = ours.union(*map(names_in, groups))
    unknown = [field for field in fields if field not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known, f"; choose from {', '.join(sorted(known))}")
        raise UserError(f"the network is a CaiT: unknown model field {unknown[0]!r}{hint}")
    added = {*fields} - ours
    used = [group for group in groups if added.intersection(names_in(group))]
    if len(used) == 1:
        return used[0]
    return dataclasses.make_dataclass("Fields", (), bases=(*used,), frozen=True)

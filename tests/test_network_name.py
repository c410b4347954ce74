"""What a network is called: by what it is, not by the recipe that it was made from."""

from __future__ import annotations

import pytest

from cait.extras.network_name import network_name
from cait.model.config import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_each_model_of_the_paper_keeps_its_name(name: str) -> None:
    assert network_name(name) == network_name(name, {"patch_size": 8, "depth": VARIANTS[name]["depth"]}) == name


@pytest.mark.parametrize(
    ("name", "fields", "shown"),
    [
        ("xxs24", {"depth": 6, "embed_dim": 96, "num_heads": 2}, "CaiT 6×96"),
        ("s24", {"depth": 4}, "CaiT 4×384"),
        ("xxs24", {"depth": 36}, "xxs36"),
        ("xxs24", "of a config.yaml written by hand", "xxs24"),
        ("timm/vit_small_patch16_224", {"depth": 4}, "timm/vit_small_patch16_224"),
        ("mine:network", None, "mine:network"),
    ],
)
def test_a_network_is_called_what_it_is(name: str, fields: object, shown: str) -> None:
    assert network_name(name, fields) == shown

"""Networks are called by what they are."""

from cait.extras.display import network_name


def test_a_network_is_called_what_it_is() -> None:
    assert network_name("m48", {"patch_size": 8, "depth": 48}) == "m48"
    assert network_name("xxs24", {"depth": 6, "embed_dim": 96, "num_heads": 2}) == "CaiT 6×96"
    assert network_name("xxs24", {"depth": 36}) == "xxs36"
    assert network_name("timm/vit_small_patch16_224", {"depth": 4}) == "timm/vit_small_patch16_224"

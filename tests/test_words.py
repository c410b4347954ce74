"""Networks are called by what they are, and times are said in words."""

from cait.extras.display import duration, network_name


def test_a_network_is_called_what_it_is() -> None:
    assert network_name("m48", {"patch_size": 8, "depth": 48}) == "m48"
    assert network_name("xxs24", {"depth": 6, "embed_dim": 96, "num_heads": 2}) == "CaiT 6×96"
    assert network_name("xxs24", {"depth": 36}) == "xxs36"
    assert network_name("timm/vit_small_patch16_224", {"depth": 4}) == "timm/vit_small_patch16_224"


def test_durations() -> None:
    shown = ["0 s", "1 min 0 s", "2 min 5 s", "3 h 4 min", "9 d 1 h"]
    assert [duration(seconds) for seconds in (0.2, 59.6, 125, 3 * 3600 + 240, 9 * 86400 + 3600)] == shown

"""The released weights, which timm has too: name by name, in every file, and from the hub."""

from pathlib import Path

import huggingface_hub.constants
import pytest
import timm
import torch
from harness import slow
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from weight_files import fill, forms, told

import cait
from cait.errors import UserError
from cait.model.weights import cached_weights

# The side of the images for the logits. At timm's own, float64 takes minutes on 2 cores, most of it for the M models:
# those of 384 and 448 pixels are compared at 64, the whole depth and width and every weight, but fewer positions.
IN_TIMM = {
    "cait_xxs24_224": 224,
    "cait_xxs24_384": 64,
    "cait_xxs36_224": 224,
    "cait_xxs36_384": 64,
    "cait_xs24_384": 64,
    "cait_s24_224": 224,
    "cait_s24_384": 64,
    "cait_s36_384": 64,
    "cait_m36_384": 64,
    "cait_m48_448": 64,
}


def pair(theirs: str, img_size: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """timm's model and ours, as shapes without memory: their initial weights take long and are not wanted."""
    with torch.device("meta"):
        return timm.create_model(theirs, img_size=img_size), cait.create_model(
            theirs.split("_")[1], img_size=img_size
        )


@pytest.mark.parametrize("theirs", ["cait_xxs24_384", "cait_m48_448", *slow(*IN_TIMM)])
def test_every_key_and_shape_is_timms(theirs: str) -> None:
    source, model = pair(theirs, int(theirs[-3:]))
    shapes, expected = (
        [(key, value.shape) for key, value in net.state_dict().items()] for net in (model, source)
    )
    assert shapes == expected  # in timm's order
    assert set(IN_TIMM) == set(timm.list_models("cait_*"))


@pytest.fixture(scope="module")
def theirs() -> dict[str, torch.Tensor]:
    model = timm.create_model("cait_xxs24_224")
    fill(model, seed=0)
    return model.state_dict()


@pytest.fixture(scope="module")
def files(
    theirs: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return forms(tmp_path_factory.mktemp("weights"), theirs)


@pytest.mark.parametrize(
    ("theirs", "img_size"),
    [
        ("cait_xxs24_224", 224),
        *slow(*((name, size) for name, size in IN_TIMM.items() if name != "cait_xxs24_224")),
    ],
)
def test_same_weights_same_logits_in_float64_both_ways(theirs: str, img_size: int) -> None:
    source, model = (net.double().eval() for net in pair(theirs, img_size))
    images = torch.randn(
        1, 3, img_size, img_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    outputs = []
    source.to_empty(device="cpu")
    for seed, (giver, taker) in enumerate([(source, model), (model, source)]):
        fill(giver, seed)
        # in one memory: M-48 takes 2.9 GB
        taker.load_state_dict(giver.state_dict(), strict=True, assign=True)
        with torch.no_grad():
            outputs.append(giver(images))
            assert (taker(images) - outputs[-1]).abs().max() <= 1e-9
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2  # other weights, other logits


def test_another_networks_weights_are_told_by_the_first_that_differs(
    theirs, files, tmp_path: Path
) -> None:
    deeper = "blocks.24.gamma_1 is missing in it, (192,) in the model"
    wider = "cls_token is (1, 1, 192) in it, (1, 1, 384) in the model"
    for path in files.values():
        assert deeper in told(path, "xxs36")
        assert wider in told(path, "s24")
    for name, change, words in [
        (
            "short",
            {"blocks.3.mlp.fc1.bias": torch.zeros(767)},
            "blocks.3.mlp.fc1.bias is (767,) in it, (768,) in",
        ),
        (
            "more",
            {"blocks.24.gamma_1": torch.zeros(192)},
            "blocks.24.gamma_1 is (192,) in it, missing in the model",
        ),
        ("deit", {"pos_embed": torch.zeros(1, 197, 192)}, "not 197 to 196"),
    ]:
        save_file(theirs | change, tmp_path / f"{name}.safetensors")
        line = told(tmp_path / f"{name}.safetensors")
        assert "is of another network" in line
        assert words in line


@pytest.fixture
def hub(files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache with XXS-24 at 224 in it, as if it had been downloaded, and no network."""
    folder = tmp_path / "hf" / "hub" / "models--timm--cait_xxs24_224.fb_dist_in1k"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "model.safetensors").symlink_to(files["x.safetensors"])
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # What has been read of them in this process.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_published_weights_come_through_timm(hub, theirs) -> None:
    same = cait.create_model("xxs24", pretrained=True).state_dict()
    larger = cait.create_model("xxs24", img_size=256, num_classes=7, pretrained=True).state_dict()
    words = "timm's cait_xxs24_384.fb_dist_in1k could not be fetched from the Hugging Face hub"
    # timm has its own at 384, but not in the cache
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=words),
    ):
        cait.create_model("xxs24", img_size=384, pretrained=True)
    with torch.device("meta"), pytest.raises(UserError, match="nobody publishes weights of xs36"):
        cait.create_model("xs36", pretrained=True)
    assert cached_weights("gcvit_tiny.in1k") is None  # published, but not on the hub
    assert same.keys() == larger.keys() == theirs.keys()
    assert all(torch.equal(same[key], value) for key, value in theirs.items())
    expected = resample_abs_pos_embed(
        theirs["pos_embed"], [16, 16], num_prefix_tokens=0, antialias=False
    )
    assert torch.equal(larger.pop("pos_embed"), expected)
    assert larger.pop("head.weight").shape == (7, 192)
    assert torch.equal(larger.pop("head.bias"), torch.zeros(7))
    assert all(torch.equal(value, theirs[key]) for key, value in larger.items())

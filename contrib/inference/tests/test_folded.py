"""The folded network gives the logits of the network, and of timm's CaiT with the same weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from modules import module
from networks import TINY, random_network
from PIL import Image
from torch import Tensor, nn

from cait.extras.publish.exporting import export
from cait.extras.publish.formats import example
from cait.model.cait import CaiT
from cait.model.config import VARIANTS
from contrib.inference import folded as folding

BOTH = [False, True]
SMALL = dict(img_size=32, num_classes=7)
FORMS: dict[str, dict[str, Any]] = {
    "no bias": {"qkv_bias": False},
    "one channel": {"in_chans": 1},
    "convolutions": {"stem": "pooled"},
}


def folded(network: nn.Module, portable: bool) -> nn.Module:
    return folding.fold(copy.deepcopy(network).eval(), portable)


@torch.no_grad()
def assert_same_logits(
    found: nn.Module, expected: nn.Module, channels: int = 3, dtype: Any = torch.float32
) -> None:
    images = torch.randn(3, channels, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits: Tensor = expected.eval()(images)
    assert logits.std() > 0.05
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found(images), logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("portable", BOTH)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_logits_are_those_of_timm(name: str, portable: bool) -> None:
    network = random_network(name, depth=3, **SMALL)
    width = dict(embed_dim=network.config.embed_dim, num_heads=network.config.num_heads)
    peer = timm.create_model("cait_xxs24_224", depth=3, **SMALL, **width)
    peer.load_state_dict(network.state_dict())
    found = folded(network, portable)
    assert_same_logits(found, peer)
    assert folding.fold(found, portable) is found  # it is folded once
    assert_same_logits(found, peer)


@pytest.mark.parametrize("portable", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_its_logits(form: str, portable: bool) -> None:
    fields = SMALL | dict(patch_size=8, embed_dim=32, num_heads=4, depth=2) | FORMS[form]
    network = random_network(**fields)
    found = folded(network, portable)
    assert_same_logits(found, network, fields.get("in_chans", 3))
    scales = [
        part
        for part in found.modules()
        if isinstance(part, nn.LayerNorm) and part.elementwise_affine
    ]
    assert not scales
    assert not [
        name
        for name in found.state_dict()
        if "gamma" in name or ("bias_" in name and "bias_w" not in name)
    ]


def test_a_batch_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen = random_network(depth=1, **SMALL), []
    monkeypatch.setattr(folding, "PART", 2 * network.pos_embed.numel())
    found: Any = folded(network, False)
    found.cait.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    assert_same_logits(found, network)
    assert seen == [2, 1]


def test_half_precision_keeps_small_factors() -> None:
    images = torch.randn(2, 3, 8, 8, dtype=torch.float16)
    network = random_network(**TINY).half().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "gamma" in name:
                parameter.fill_(1e-6)
        assert torch.equal(folded(network, True)(images), network(images))
    assert_same_logits(
        folded(random_network(depth=1, **SMALL).bfloat16(), True),
        random_network(depth=1, **SMALL).bfloat16(),
        dtype=torch.bfloat16,
    )


def test_a_subclass_stays_as_it_is() -> None:
    network: Any = random_network(**TINY, talking_heads=False)
    assert isinstance(network, CaiT)
    before = copy.deepcopy(network.state_dict())
    assert folding.fold(network) is network
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_run_predicts_with_a_folded_network() -> None:
    net = module(img_size=8)
    net.eval_transform = lambda image: torch.zeros(3, 8, 8)
    image = Image.new("RGB", (8, 8))
    before = net.predict(image)
    net.model = folding.fold(net.model.eval())
    assert isinstance(net.model, folding.InParts)
    for found, expected in zip(net.predict(image), before, strict=True):
        assert found["index"] == expected["index"]
        assert found["probability"] == pytest.approx(expected["probability"], abs=1e-5)


def test_an_exported_network_has_fewer_operations(tmp_path: Path) -> None:
    network = random_network(depth=2, **SMALL)
    fewer, whole = (folded(network, True), network.eval())
    counts = [
        len(torch.export.export(each, **example((3, 32, 32)), strict=False).graph.nodes)
        for each in (fewer, whole)
    ]
    assert counts[0] < counts[1]
    export(fewer, tmp_path / "model.pt2", "torch_export", input_shape=(3, 32, 32))
    written = torch.export.load(tmp_path / "model.pt2")
    assert not [name for name in written.state_dict if "gamma" in name]
    assert_same_logits(written.module(), network)

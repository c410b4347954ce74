"""The folded network gives the logits of the network."""

import copy

import pytest
import torch
from modules import module
from networks import TINY, random_network
from PIL import Image

from cait.extras.publish.exporting import export
from cait.extras.publish.formats import example
from cait.model.config import VARIANTS
from contrib.inference import folded as folding

SMALL = dict(img_size=32, num_classes=7)
NARROW = dict(patch_size=8, embed_dim=32, num_heads=4, depth=2)
FORMS = [
    *[dict(name=name, depth=3) for name in VARIANTS],
    dict(qkv_bias=False, **NARROW),
    dict(in_chans=1, **NARROW),
    dict(stem="pooled", **NARROW),
]


def folded(network, portable):
    return folding.fold(copy.deepcopy(network).eval(), portable)


@torch.no_grad()
def assert_same_logits(fast, network, tolerance=1e-5):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, *network.input_shape, generator=generator).to(network.pos_embed.dtype)
    logits = network.eval()(images)
    assert logits.std() > 0.05
    torch.testing.assert_close(fast(images), logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_keeps_its_logits(form, portable):
    network = random_network(**SMALL, **form)
    fast = folded(network, portable)
    assert folding.fold(fast, portable) is fast  # it is folded once
    assert_same_logits(fast, network)
    for part in fast.modules():
        assert not getattr(part, "elementwise_affine", False)
    assert not any("gamma" in name for name in fast.state_dict())


def test_a_batch_is_taken_in_parts(monkeypatch):
    network = random_network(depth=1, **SMALL)
    monkeypatch.setattr(folding, "PART", 2 * network.pos_embed.numel())
    fast = folded(network, portable=False)
    seen = []
    fast.cait.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert_same_logits(fast, network)
    assert seen == [2, 1]


@torch.no_grad()
def test_half_precision_keeps_small_factors():
    network = random_network(**TINY).half().eval()
    for name, parameter in network.named_parameters():
        if "gamma" in name:
            parameter.fill_(1e-6)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float16)
    assert torch.equal(folded(network, True)(images), network(images))
    network = random_network(depth=1, **SMALL).bfloat16()
    assert_same_logits(folded(network, True), network, tolerance=0.05)


def test_a_subclass_stays_as_it_is():
    network = random_network(**TINY, talking_heads=False)
    before = copy.deepcopy(network.state_dict())
    assert folding.fold(network) is network
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_a_run_predicts_with_a_folded_network():
    net = module(img_size=8)
    net.eval_transform = lambda image: torch.zeros(3, 8, 8)
    before = net.predict(Image.new("RGB", (8, 8)))
    net.model = folding.fold(net.model.eval())
    for fast, expected in zip(net.predict(Image.new("RGB", (8, 8))), before, strict=True):
        assert fast == pytest.approx(expected, abs=1e-5)


def operations(network):
    program = torch.export.export(network, **example((3, 32, 32)), strict=False)
    return len(program.graph.nodes)


def test_an_exported_network_has_fewer_operations(tmp_path):
    network = random_network(depth=2, **SMALL).eval()
    fewer = folded(network, portable=True)
    assert operations(fewer) < operations(network)
    export(fewer, tmp_path / "model.pt2", "torch_export", input_shape=(3, 32, 32))
    written = torch.export.load(tmp_path / "model.pt2")
    assert not any("gamma" in name for name in written.state_dict)
    assert_same_logits(written.module(), network)

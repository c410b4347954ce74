"""Networks in CaiT's place: built by name, and with their optional parts used.

What is said of those that cannot be built, or are no network, is in tests/cli/golden/model.yaml.
"""

import pytest
import torch
from harness import over_table
from modules import loader, module, trainer
from resumes import assert_resumes
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cait.errors import UserError
from cait.model import network
from cait.model.weights import classifier_keys, load_weights


class Plain(nn.Module):
    """A network with none of the optional parts."""

    def __init__(self, img_size, num_classes, width=8):
        super().__init__()
        self.body = nn.Conv2d(3, width, 3)
        self.neck = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.neck(self.body(images).mean(dim=(2, 3))))


class Dropping(Plain):
    """Takes stochastic depth, as few networks do."""

    def __init__(self, drop_path_rate, **fields):
        super().__init__(**fields)
        assert drop_path_rate == 0.1


def any_arguments(**fields):
    return Dropping(**fields)


@over_table(__file__, "names")
def test_a_name_becomes_a_network_of_the_size(case, name, fields, heads):
    built = network.create_model(name, 32, 7, 0.1, **fields)
    assert type(built).__name__ == case
    assert built(torch.randn(3, 3, 32, 32)).shape == (3, 7)
    assert {key.rpartition(".")[0] for key in classifier_keys(built)} == {*heads}


@over_table(__file__, "formats", fields={})
def test_timms_networks_of_convolutions_run_in_channels_last(name, fields, channels, is_last):
    built = network.create_model(name, 32, 7, **fields).eval()
    formats = set()

    def look(_, __, output):
        if output.shape[-1] > 1:  # one of a single pixel is in both formats
            formats.add(output.is_contiguous(memory_format=torch.channels_last))

    for layer in built.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(look)
    images = torch.randn(2, channels, 32, 32)
    logits = built(images)
    assert formats == {is_last}
    built.to(memory_format=torch.contiguous_format)
    torch.testing.assert_close(built(images), logits, rtol=1e-4, atol=1e-5)


def test_a_run_in_channels_last_resumes_to_the_bit_whatever_format_was_saved(tmp_path):
    path = tmp_path / "x.ckpt"

    def lay_out_anew():
        checkpoint = torch.load(path, weights_only=True)
        assert not checkpoint["state_dict"]["model.conv_stem.weight"].is_contiguous()
        torch.save(tree_map_only(Tensor, Tensor.contiguous, checkpoint), path)

    settings = dict(name="timm/test_efficientnet", fields=None, lr=1e-2)
    assert_resumes(path, settings, between=lay_out_anew)


@over_table(__file__, "checkpointed")
def test_activations_are_checkpointed_where_a_network_can(name, fields):
    built = module(name=name, img_size=32, fields=fields, grad_checkpointing=True)
    assert built.model.grad_checkpointing is True


def test_batchnorm_that_is_frozen_may_checkpoint_its_activations():
    """Else it would count each batch twice, which is refused."""
    net = module(name="timm/test_resnet", fields=None, grad_checkpointing=True)
    assert network.counts_twice(net.model)
    net.model.eval()
    trainer(max_epochs=1).fit(net, loader())
    assert network.counts_twice(network.create_model("timm/test_efficientnet", 32, 7))
    assert not network.counts_twice(network.create_model("timm/test_convnext", 32, 7))


def test_weights_are_fitted_by_timm(tmp_path):
    theirs = network.create_model("timm/test_vit", 32, 7)
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    ours = network.create_model("timm/test_vit", 64, 5)
    notes = load_weights(ours, tmp_path / "x.pth")
    assert [note.partition(" ")[0] for note in notes] == ["pos_embed", "the"]  # and the head
    torch.testing.assert_close(ours.blocks[0].attn.qkv.weight, theirs.blocks[0].attn.qkv.weight)
    with pytest.raises(UserError, match=r"x\.pth"):
        load_weights(network.create_model("timm/test_vit2", 32, 7), tmp_path / "x.pth")


def test_logits_are_in_float32_and_those_of_a_sharded_network_as_it_trains():
    layer, features = nn.Linear(4, 3), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = network.logits_of(layer, features)
        layer.weight.full_tensor = layer.weight.detach  # as a DTensor has it
        sharded = network.logits_of(layer, features)
        assert torch.equal(sharded, layer(features))
    assert (whole.dtype, sharded.dtype) == (torch.float32, torch.bfloat16)

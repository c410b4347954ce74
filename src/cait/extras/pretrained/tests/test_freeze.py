"""Frozen weights: what trains and what does not, against scikit-learn."""

import modules
import pytest
import timm
import torch
from networks import fill
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader

from cait.extras.networks import lower_keys
from cait.train.module import CaiTModule


def digits(count=None):
    """The digits as images [N, 3, 8, 8], with their labels."""
    digits = load_digits()
    images = torch.from_numpy(digits.images[:count]).float() / 8 - 1
    return images[:, None].repeat(1, 3, 1, 1), torch.from_numpy(digits.target[:count])


def module(name, **settings):
    """A module for ten classes that trains at its rate from the first step."""
    usual = dict(img_size=8, num_classes=10, lr_base_size=None, warmup_epochs=0)
    return CaiTModule(**({"name": name} | usual | settings))


def train(module, *batches):
    """Train a module on batches as they are; returns which of its weights and statistics stayed."""
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    modules.trainer(max_epochs=1).fit(module, DataLoader(list(batches), batch_size=None))
    after = module.model.state_dict()
    return {name for name in after if torch.equal(before[name], after[name])}


def test_a_linear_probe_is_scikit_learns_logistic_regression(tmp_path):
    """On a file of timm's. Adam adds the decay to the gradient, so it ends at the minimum of the same function."""
    fields = dict(embed_dim=32, depth=1, num_heads=2, patch_size=4, global_pool="avg")
    network = timm.create_model("vit_tiny_patch16_224", img_size=8, num_classes=7, **fields).eval()
    # timm draws them so small that all images have nearly the same features
    fill(network)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    images, labels = digits()
    few, decay = 400, 0.03
    with torch.no_grad():
        features = network.forward_head(network.forward_features(images), pre_logits=True)
    oracle = LogisticRegression(C=1 / (few * decay), max_iter=5000, tol=1e-8)
    oracle.fit(features[:few], labels[:few])
    expected = oracle.score(features[few:], labels[few:])
    assert expected > 0.6

    probe = module(
        "timm/vit_tiny_patch16_224", fields=fields, drop_path_rate=0.5, weights=str(tmp_path / "vit.pth"), freeze=True,
        optimizer="torch.optim:Adam", weight_decay=decay, lr=0.1, min_lr=0, label_smoothing=0,
    )  # fmt: skip
    train(probe, *[(images[:few], labels[:few])] * 200)
    with torch.no_grad():
        answers = probe.eval()(images[few:]).argmax(1)
    score = (answers == labels[few:]).double().mean().item()
    assert score == pytest.approx(expected, abs=0.005)
    weights = probe.model.state_dict()
    for name, value in network.state_dict().items():
        assert "head" in name or torch.equal(weights[name], value), name


class Normed(nn.Module):
    """A network of one's own with BatchNorm and Dropout."""

    def __init__(self, img_size, num_classes):
        super().__init__()
        linear = nn.Linear(3 * img_size**2, 8)
        self.body = nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        return self.head(self.drop(self.body(images)))


def test_frozen_parts_compute_as_in_evaluation_whatever_others_do():
    """Another callback may put the whole network into training in any step, as drawing attention maps does."""
    frozen = module(f"{__name__}:Normed", freeze=True)
    network = frozen.model
    modes = []

    def look(*_):
        parts = (network, network.head, network.body, network.drop)
        modes.append([part.training for part in parts])

    def disturb(*_):
        network.train()

    network.body.register_forward_pre_hook(look)
    network.head.register_forward_hook(disturb)
    stayed = train(frozen, *[digits(8)] * 3)
    assert modes[-3:] == [[True, True, False, False]] * 3
    assert network.state_dict().keys() - stayed == {"head.weight", "head.bias"}
    groups = frozen.trainer.optimizers[0].param_groups
    assert sum(len(group["params"]) for group in groups) == 2


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_batch_norm_keeps_its_statistics_while_its_scale_trains(grad_checkpointing):
    """timm's BatchNorm with activation among them; activations that are computed again are not counted twice."""
    settings = dict(img_size=32, lr=0.01, drop_path_rate=0, freeze_norm=True)
    held = module("timm/test_efficientnet", grad_checkpointing=grad_checkpointing, **settings)
    network = held.model
    for statistic in network.buffers():
        if statistic.is_floating_point():
            statistic.uniform_(0.5, 1.5)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        in_evaluation = network.eval()(images)
    network.train()
    seen = []
    network.register_forward_hook(
        lambda network, _, logits: seen.append((network.training, logits))
    )
    stayed = train(held, *[(images, torch.arange(4))] * 2)
    is_training, logits = seen[0]
    assert is_training
    assert torch.equal(logits, in_evaluation)
    assert len(stayed) > 10
    assert stayed == {name for name, _ in network.named_buffers()}


def test_a_share_of_the_layers_stays_and_the_rest_trains():
    """Of 17 layers of timm's, a stem, 16 blocks and a head, a third are the stem and the blocks of three stages."""
    share = dict(lr=0.01, drop_path_rate=0.5, freeze=0.33)
    held = module("timm/tf_efficientnet_lite0", img_size=32, **share)
    blocks = held.model.blocks
    modes = []
    for part in (blocks[2], blocks[3][1].drop_path):
        part.register_forward_hook(lambda part, *_: modes.append(part.training))
    stayed = train(held, *[(torch.randn(4, 3, 32, 32), torch.arange(4))] * 2)
    assert modes[-2:] == [False, True]
    lower = ("conv_stem", "bn1", "blocks.0", "blocks.1", "blocks.2")
    assert stayed == {name for name in held.model.state_dict() if name.startswith(lower)}


class Grouped(Normed):
    def group_matcher(self, coarse):
        return {"stem": r"^body", "blocks": r"^head"}


def test_the_layers_of_an_own_network_are_told_apart_as_for_layer_decay():
    network = Grouped(8, 10)
    body = {f"body.{name}" for name, _ in network.body.named_parameters()}
    assert lower_keys(network, 0.5) == body

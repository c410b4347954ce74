"""Frozen weights: what trains and what does not, against scikit-learn, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from harness import SMALL, checkpoint, ended
from lightning.pytorch import Trainer
from runs import kill_and_resume
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader

from cait import ckpt
from cait.errors import UserError
from cait.extras.pretrained import freeze as parts
from cait.extras.pretrained.freeze import Freeze
from cait.model.network import create_model
from cait.train.module import CaiTModule

TINY: dict = dict(embed_dim=32, depth=2, num_heads=2, patch_size=4)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits as images [N, 3, 8, 8], with their labels."""
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    return images.repeat(1, 3, 1, 1), torch.from_numpy(found.target)


def trained(module: CaiTModule, batches: list, folder: Path, start: Path | None = None, **settings: int) -> CaiTModule:
    """Train a module on batches as they are, in this process, perhaps from a checkpoint."""
    quiet: dict = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[Freeze()], default_root_dir=folder, **quiet, **settings)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=start)
    return module


def test_a_linear_probe_is_scikit_learns_logistic_regression(tmp_path: Path) -> None:
    """On a file of timm's. Adam adds the decay to the gradient, so it ends at the minimum of the same function."""
    fields = dict(embed_dim=32, depth=1, num_heads=2, patch_size=4, global_pool="avg")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=8, num_classes=7, **fields).eval()
    for weight in network.parameters():  # timm draws them so small that all images have nearly the same features
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    images, labels = digits()
    few, decay = 400, 0.03
    with torch.no_grad():
        features = network.forward_head(network.forward_features(images), pre_logits=True).numpy()
    oracle = LogisticRegression(C=1 / (few * decay), max_iter=5000, tol=1e-8).fit(features[:few], labels[:few])
    module = CaiTModule(
        name="timm/vit_tiny_patch16_224", img_size=8, num_classes=10, fields=fields, drop_path_rate=0.5,
        weights=str(tmp_path / "vit.pth"), freeze=True, optimizer="torch.optim:Adam", weight_decay=decay,
        lr=0.1, lr_base_size=None, min_lr=0, warmup_epochs=0, label_smoothing=0,
    )  # fmt: skip
    trained(module, [(images[:few], labels[:few])] * 200, tmp_path, max_epochs=1)
    with torch.no_grad():
        answers = module.eval()(images[few:]).argmax(1)
    score = 100 * (answers == labels[few:]).double().mean().item()
    expected = 100 * oracle.score(features[few:], labels[few:])
    assert score == pytest.approx(expected, abs=0.5)
    assert expected > 60
    weights = module.model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in network.state_dict().items() if "head" not in key)


STEM = ["--model.fields.stem=conv", "--model.fields.patch_size=2", "--data.img_size=8"]
FROZEN = ["--model.weights=conv.pth", "--model.freeze=1"]
BRIEF = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=4", "--save_every_n_steps=3", "--data.num_workers=0"]
ABOUT = ["--model.drop_path_rate=0.3", "--ema.decay=0.9", "--trainer.log_every_n_steps=1"]
RECIPE = [*SMALL, *STEM, *FROZEN, *BRIEF, *ABOUT]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run on the weights of a CaiT with BatchNorm in its stem, whose first block is frozen."""
    torch.manual_seed(0)
    network = create_model("xxs24", 8, 10, **TINY | {"patch_size": 2, "stem": "conv"})
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    torch.save(network.state_dict(), place / "conv.pth")
    return ended(place, "whole", RECIPE)


def is_frozen(name: str) -> bool:
    return name.startswith(("patch_embed.", "pos_embed", "blocks.0."))


def test_a_killed_run_ends_with_the_same_bits(whole: Path, place: Path) -> None:
    assert "random" not in kill_and_resume(place, RECIPE, whole)


def test_what_is_frozen_never_moves_and_has_no_moments(whole: Path, place: Path) -> None:
    begin, end = torch.load(place / "conv.pth"), checkpoint(whole)
    weights, average, (optimizer,) = ckpt.weights(end), ckpt.average(end), end["optimizer_states"]
    moved = {name for name in begin if not torch.equal(begin[name], weights[name])}
    trains = {name for name in begin if not is_frozen(name)}
    assert trains - moved == {"blocks.1.attn.proj_l.bias"}  # the softmax takes it away
    assert moved < trains  # among the others are running_mean, running_var and num_batches_tracked
    assert any("running_mean" in name for name in begin)
    assert all(torch.equal(begin[name], average[name]) for name in begin.keys() - trains)
    groups = optimizer["param_groups"]
    assert len(optimizer["state"]) == sum(len(group["params"]) for group in groups) == len(trains)


class Normed(nn.Module):
    """A network of one's own with BatchNorm and Dropout; a checkpoint of it is random, and no warning says so."""

    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * img_size**2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(images)))


class Headless(nn.Module):
    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3))[:, None] * self.scale


def test_frozen_parts_compute_as_in_evaluation_whatever_others_do(tmp_path: Path) -> None:
    """Another callback may put the whole network into training in any step, as drawing attention maps does."""
    images, labels = digits()
    seen: list[tuple[bool, ...]] = []
    module = CaiTModule(
        name=f"{__name__}:Normed", img_size=8, num_classes=10, freeze=True, warmup_epochs=0, lr_base_size=None
    )
    network = module.model

    def look(*_: object) -> None:
        seen.append(tuple(each.training for each in (network, network.head, network.body, network.drop)))

    def disturb(*_: object) -> None:
        network.train()

    network.body.register_forward_pre_hook(look)
    network.head.register_forward_hook(disturb)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trained(module, [(images[:8], labels[:8])] * 3, tmp_path, max_epochs=1)
    assert seen[-3:] == [(True, True, False, False)] * 3
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("backend", ["reference", "recompute"])
def test_the_gradients_of_the_rest_are_those_of_the_whole_network(backend: str) -> None:
    """The hand-written backward passes see an input that needs no gradient."""
    gradients = []
    for freeze in (False, 1):
        torch.manual_seed(0)
        network = create_model("xxs24", 8, 10, drop_path_rate=0.0, attention_backend=backend, **TINY).double().train()
        if freeze:
            parts.freeze(network, "xxs24", freeze)
        network(torch.randn(4, 3, 8, 8).double()).square().mean().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    kept = {name for name, gradient in gradients[1].items() if gradient is not None}
    assert kept == {name for name in gradients[0] if not is_frozen(name)}
    for name in kept:
        torch.testing.assert_close(gradients[1][name], gradients[0][name])


@pytest.mark.parametrize(
    ("name", "blocks", "last", "later"),
    [
        ("vit_tiny_patch16_224", 12, "blocks.11.mlp.fc2.bias", {"norm", "head"}),
        ("resnet18", 4, "layer4.1.bn2.bias", {"fc"}),
        ("convnext_atto", 4, "stages.3.blocks.1.mlp.fc2.bias", {"head"}),
        ("efficientnet_b0", 7, "blocks.6.0.bn3.bias", {"conv_head", "bn2", "classifier"}),
        ("cait_xxs24_224", 24, "blocks.23.mlp.fc2.bias", {"cls_token", "blocks_token_only", "norm", "head"}),
    ],
)
def test_stages_are_in_timms_order(name: str, blocks: int, last: str, later: set[str]) -> None:
    with torch.device("meta"):
        network = timm.create_model(name)
    found = parts.stages(network, name)
    assert len(found) == 1 + blocks
    assert found[-1][-1] == last
    rest = {key for key, _ in network.named_parameters()} - {key for stage in found for key in stage}
    assert {key.partition(".")[0] for key in rest} == later
    assert len(found[0]) < 6


def test_networks_without_the_part_are_refused() -> None:
    own = Normed(8, 10)
    with pytest.raises(UserError, match=r"net:Net has no group_matcher\(\), which model\.freeze N needs"):
        parts.freeze(own, "net:Net", 1)
    with pytest.raises(UserError, match="net:Net has no classifier, which"):
        parts.freeze(Headless(8, 10), "net:Net", True)
    with pytest.raises(UserError, match="freeze 3: xxs24 has 2 blocks"):
        parts.freeze(create_model("xxs24", 8, 10, **TINY), "xxs24", 3)
    network = create_model("xxs24", 8, 10, **TINY)
    parts.freeze(network, "xxs24", True)
    trains = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert trains == {"head.weight", "head.bias"}


def test_batch_norm_keeps_its_statistics_while_its_scale_trains(tmp_path: Path) -> None:
    """timm's BatchNorm with activation among them. A run that goes on from its checkpoint ends with the same bits."""
    images, labels = digits()
    images, labels = nn.functional.interpolate(images[:8], size=32), labels[:8]

    def module() -> CaiTModule:
        torch.manual_seed(0)
        settings: dict = dict(
            name="timm/test_efficientnet", img_size=32, num_classes=10, lr=0.01, min_lr=0.01, drop_path_rate=0
        )
        made = CaiTModule(**settings, freeze_norm=True, lr_base_size=None, warmup_epochs=0)
        for value in made.model.buffers():
            if value.is_floating_point():
                value.uniform_(0.5, 1.5)
        return made

    first = module()
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    with torch.no_grad():
        expected = first.model.eval()(images)
    first.model.train()
    seen: list = []
    hook = first.model.register_forward_hook(lambda *given: seen.append((given[0].training, given[-1].detach())))
    trained(first, [(images, labels)] * 2, tmp_path, max_epochs=2)
    hook.remove()
    assert seen[0][0]
    assert torch.equal(seen[0][1], expected)
    after = first.model.state_dict()
    statistics = {name for name, _ in first.model.named_buffers()}
    assert len(statistics) > 10
    assert {name for name in before if torch.equal(before[name], after[name])} == statistics
    trainer = trained(module(), [(images, labels)] * 2, tmp_path, max_epochs=1).trainer
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = trained(module(), [(images, labels)] * 2, tmp_path, tmp_path / "half.ckpt", max_epochs=2)
    assert all(torch.equal(value, after[name]) for name, value in second.model.state_dict().items())

"""Frozen weights: what trains and what does not, against scikit-learn, and after a resume."""

from pathlib import Path

import pytest
import timm
import torch
from lightning.pytorch import Trainer
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader

from cait.errors import UserError
from cait.extras.networks import lower_keys
from cait.train.module import CaiTModule


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits as images [N, 3, 8, 8], with their labels."""
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    return images.repeat(1, 3, 1, 1), torch.from_numpy(found.target)


def trained(
    module: CaiTModule, batches: list, folder: Path, start: Path | None = None, **settings: int
) -> CaiTModule:
    """Train a module on batches as they are, in this process, perhaps from a checkpoint."""
    quiet: dict = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **settings)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=start)
    return module


def test_a_linear_probe_is_scikit_learns_logistic_regression(tmp_path: Path) -> None:
    """On a file of timm's. Adam adds the decay to the gradient, so it ends at the minimum of the same function."""
    fields = dict(embed_dim=32, depth=1, num_heads=2, patch_size=4, global_pool="avg")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=8, num_classes=7, **fields).eval()
    # timm draws them so small that all images have nearly the same features
    for weight in network.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    images, labels = digits()
    few, decay = 400, 0.03
    with torch.no_grad():
        features = network.forward_head(network.forward_features(images), pre_logits=True).numpy()
    oracle = LogisticRegression(C=1 / (few * decay), max_iter=5000, tol=1e-8).fit(
        features[:few], labels[:few]
    )
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
    assert all(
        torch.equal(weights[key], value)
        for key, value in network.state_dict().items()
        if "head" not in key
    )


class Normed(nn.Module):
    """A network of one's own with BatchNorm and Dropout; a checkpoint of it is random, and no warning says so."""

    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * img_size**2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        )
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(images)))


def test_frozen_parts_compute_as_in_evaluation_whatever_others_do(tmp_path: Path) -> None:
    """Another callback may put the whole network into training in any step, as drawing attention maps does."""
    images, labels = digits()
    seen: list[tuple[bool, ...]] = []
    module = CaiTModule(
        name=f"{__name__}:Normed",
        img_size=8,
        num_classes=10,
        freeze=True,
        warmup_epochs=0,
        lr_base_size=None,
    )
    network = module.model

    def look(*_: object) -> None:
        seen.append(
            tuple(each.training for each in (network, network.head, network.body, network.drop))
        )

    def disturb(*_: object) -> None:
        network.train()

    network.body.register_forward_pre_hook(look)
    network.head.register_forward_hook(disturb)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trained(module, [(images[:8], labels[:8])] * 3, tmp_path, max_epochs=1)
    assert seen[-3:] == [(True, True, False, False)] * 3
    moved = {
        name for name, value in network.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved == {"head.weight", "head.bias"}
    optimizer = module.trainer.optimizers[0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_batch_norm_keeps_its_statistics_while_its_scale_trains(tmp_path: Path) -> None:
    """timm's BatchNorm with activation among them. A run that goes on from its checkpoint ends with the same bits."""
    images, labels = digits()
    images, labels = nn.functional.interpolate(images[:8], size=32), labels[:8]

    def module() -> CaiTModule:
        torch.manual_seed(0)
        settings: dict = dict(
            name="timm/test_efficientnet",
            img_size=32,
            num_classes=10,
            lr=0.01,
            min_lr=0.01,
            drop_path_rate=0,
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
    hook = first.model.register_forward_hook(
        lambda *given: seen.append((given[0].training, given[-1].detach()))
    )
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
    second = trained(
        module(), [(images, labels)] * 2, tmp_path, tmp_path / "half.ckpt", max_epochs=2
    )
    assert all(torch.equal(value, after[name]) for name, value in second.model.state_dict().items())


def test_a_share_of_the_layers_stays_and_the_rest_trains(tmp_path: Path) -> None:
    """Of 17 layers of timm's, a stem, 16 blocks and a head, a third are the stem and the blocks of three stages."""
    images = torch.randn(4, 3, 32, 32)
    how: dict = dict(
        name="timm/tf_efficientnet_lite0",
        img_size=32,
        num_classes=5,
        lr_base_size=None,
        warmup_epochs=0,
    )
    module = CaiTModule(**how, lr=0.01, drop_path_rate=0.5, freeze=0.33)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    training: list[bool] = []
    parts = [module.model.blocks[2], module.model.blocks[3][1].drop_path]
    for part in parts:
        part.register_forward_hook(lambda part, *_: training.append(part.training))
    trained(module, [(images, torch.arange(4))] * 2, tmp_path, max_epochs=1)
    assert training[-2:] == [False, True]
    after = module.model.state_dict()
    stayed = {name for name in after if torch.equal(before[name], after[name])}
    assert stayed == {
        name
        for name in after
        if name.startswith(("conv_stem", "bn1", "blocks.0", "blocks.1", "blocks.2"))
    }


class Grouped(Normed):
    def group_matcher(self, coarse: bool) -> dict[str, str]:
        return {"stem": r"^body", "blocks": r"^head"}


def test_the_layers_of_an_own_network_are_told_apart_as_for_layer_decay() -> None:
    network = Grouped(8, 10)
    assert lower_keys(network, 0.5) == {
        name for name, _ in network.named_parameters() if name.startswith("body")
    }


def test_statistics_that_stay_are_not_counted_twice_where_activations_are_computed_again(
    tmp_path: Path,
) -> None:
    images = torch.randn(4, 3, 32, 32)
    how: dict = dict(
        name="timm/test_efficientnet",
        img_size=32,
        num_classes=5,
        lr_base_size=None,
        warmup_epochs=0,
    )
    module = CaiTModule(**how, drop_path_rate=0, freeze_norm=True, grad_checkpointing=True)
    before = {name: value.clone() for name, value in module.model.named_buffers()}
    trained(module, [(images, torch.arange(4))], tmp_path, max_epochs=1)
    assert all(torch.equal(before[name], value) for name, value in module.model.named_buffers())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"freeze": 1.5}, "freeze must be true, false, or a share of the layers below 1, got 1.5"),
        (
            {"freeze": 0.5, "name": f"{__name__}:Normed"},
            "names no layers, which model.freeze 0.5 needs",
        ),
        (
            {"layer_decay": 0.5, "name": f"{__name__}:Normed"},
            "Normed names no layers, which layer_decay needs",
        ),
    ],
)
def test_shares_that_cannot_be_held_are_refused(settings: dict, words: str, tmp_path: Path) -> None:
    images, labels = digits()
    how: dict = {"name": "timm/test_resnet", "img_size": 8, "num_classes": 10} | settings
    with pytest.raises(UserError, match=words):
        trained(CaiTModule(**how), [(images[:8], labels[:8])], tmp_path, max_epochs=1)
